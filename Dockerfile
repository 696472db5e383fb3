# Tarantella on CPUs, with the examples; docs/containers.md says how to use it. For GPUs, build with
# --build-arg EXTRAS=gpu,examples. The base image must have a Python from 3.10 to 3.13.
ARG BASE=python:3.12-slim
FROM ${BASE}

# Between hosts, ranks are started by ssh.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/*
COPY containers/ssh_config /etc/ssh/ssh_config.d/tarantella.conf
COPY containers/sshd_config /etc/tarantella/sshd_config

RUN useradd --create-home --uid 1000 tarantella
WORKDIR /opt/tarantella
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
# In a virtual environment, whose MPI library is found whatever Python the base image has.
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
ARG EXTRAS=cpu,examples
RUN python3 -m pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"
COPY examples examples

USER tarantella
WORKDIR /home/tarantella
CMD ["tarantella", "-n", "2", "--no-gpu", "--", "/opt/tarantella/examples/quickstart.py"]
