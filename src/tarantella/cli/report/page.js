// Draws the figures in the colours of the page, and again when these change.
"use strict";

const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const touch = window.matchMedia("(pointer: coarse)").matches;

function themed(figure) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const axis = {
    automargin: true, gridcolor: colour("--line"), linecolor: colour("--line"),
    zerolinecolor: colour("--line"),
  };
  return {
    margin: { l: 8, r: 12, t: 8, b: 8 },
    height: figure.height,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: colour("--text"), family: "system-ui, sans-serif", size: 12 },
    // Plotly counts only visible traces, the legend counts all of them.
    colorway: figure.data.flatMap((trace, index) =>
      trace.visible === false ? [] : [colour(`--c${index}`)]),
    hoverlabel: { bgcolor: colour("--card"), font: { color: colour("--text") } },
    showlegend: false, // the page has one, which also fits a narrow screen
    dragmode: touch ? false : "zoom", // a finger scrolls the page
    ...figure.layout,
    xaxis: { ...axis, ...figure.layout.xaxis },
    yaxis: { ...axis, ...figure.layout.yaxis },
  };
}

function draw() {
  for (const figure of figures) {
    Plotly.react(figure.id, figure.data, themed(figure), {
      responsive: true, displayModeBar: false,
    });
  }
}

draw();
dark.addEventListener("change", draw);
