"""Every time that the library waits, in seconds, with its reason and what it depends on.

The times that users can set are in `configuration`: the stall timeout, the grace period and the
time for hosts to answer. Code reads these here as `times.NAME`. Standard library only.
"""

from __future__ import annotations

# --- Ranks that wait for each other in a collective -------------------------------------------

# A rank that shares its core with others checks again and again whether they have arrived. The
# first checks come without a pause, since the others are often about to arrive; then the pauses
# double, from long enough to let another rank run to short enough not to delay a step.
CHECKS_WITHOUT_PAUSE = 50
SHORTEST_PAUSE = 20e-6
LONGEST_PAUSE = 1e-3
# Gradients are sent in the background, and MPI makes progress only when it is called: on a link of
# 1 Gbit/s, twice this pause costs a tenth of the speed.
LONGEST_PAUSE_FOR_GRADIENTS = 100e-6
assert SHORTEST_PAUSE < LONGEST_PAUSE_FOR_GRADIENTS < LONGEST_PAUSE

# Between steps, ranks tell each other this often whether one of them was asked to stop: nobody
# notices a stop that comes 20 ms later; asking in every step would make one of 1 ms 5 % longer.
TIME_BETWEEN_REQUESTS = 0.02

# --- Ranks that make no progress: the stall timeout -------------------------------------------

# A run is ended after this many times the stall timeout.
STALL_TIMEOUTS_TO_END = 10
# The thread that watches a rank looks this often within the stall timeout, so that it reports a
# stall soon after the timeout; and at least every few seconds, so that reports stay fresh.
LOOKS_PER_STALL_TIMEOUT = 4
LONGEST_TIME_BETWEEN_REPORTS = 5.0
# A thread that sleeps longer than it asked for, by this much and more, was stopped with its rank.
SHORTEST_STOP = 1.0
# The command waits for one report of every other rank before it warns ...
TIME_FOR_REPORTS = 6.0
assert TIME_FOR_REPORTS > LONGEST_TIME_BETWEEN_REPORTS
# ... and forgets a report that was not repeated, even if one repetition was lost.
REPORT_IS_FRESH = 12.0
assert REPORT_IS_FRESH > 2 * LONGEST_TIME_BETWEEN_REPORTS

# --- A rank that fails ------------------------------------------------------------------------

# When all ranks fail alike, only the first one should report: each waits a little longer than the
# one before it, and is ended meanwhile. The shortest turn leaves time for a traceback and
# MPI_Abort; the longest limits the wait of a high rank that fails alone.
SHORTEST_TURN = 0.6
TURN_OF_EACH_RANK = 0.05
LONGEST_TURN = 2.0
# MPI_Abort drops what the launcher has not yet read.
TIME_TO_READ_BEFORE_ABORT = 0.2
assert TIME_TO_READ_BEFORE_ABORT < SHORTEST_TURN
# A rank that only passes on the error of another one lets every rank with its own error report
# first.
TURN_OF_AN_ECHO = LONGEST_TURN + SHORTEST_TURN
# To the others, a rank whose data fail looks like one whose data end: they give it time to report
# its error before they raise one about it.
TIME_FOR_DATA_ERROR = 4.0
assert TIME_FOR_DATA_ERROR > LONGEST_TURN + TIME_TO_READ_BEFORE_ABORT
# MPICH ends the other ranks with the status of the one that called MPI_Abort; once one has ended,
# this is the time for the cause to arrive.
TIME_FOR_CAUSE = 1.0
assert TIME_FOR_CAUSE > TIME_TO_READ_BEFORE_ABORT
# Ranks of a script end together. After one has left without a word, the others have this long.
TIME_TO_END_TOGETHER = 5.0
assert TIME_TO_END_TOGETHER > TIME_FOR_CAUSE

# --- Announcements of ranks to the command ----------------------------------------------------

# Some launchers tear a line unless it is alone in the pipe: a rank checks this often, and for this
# long, whether the pipe is empty.
PIPE_CHECK_INTERVAL = 0.0002
TIME_FOR_EMPTY_PIPE = 1.0
# Open MPI drops output that is still in flight when a rank has ended.
TIME_TO_READ_BEFORE_END = 0.3
# Ranks report what they have done this often: often enough to draw a run of a minute, and seldom
# enough to cost nothing.
TIME_BETWEEN_MEASUREMENTS = 5.0
# On other hosts, supervisors send heartbeats ...
TIME_BETWEEN_HEARTBEATS = 5.0
# ... and after this long without one, when several are missing, the host is considered dead.
HOST_IS_DEAD = 30.0
assert HOST_IS_DEAD > 3 * TIME_BETWEEN_HEARTBEATS
# Supervisors on a host that has lost the others notice it, too: the kernel retransmits what is not
# acknowledged, and waits twice as long each time. This many take about 25 seconds, a little
# less than the command waits: both sides end at about the same time.
REPEATS_UNTIL_CUT_OFF = 7
# A rank on another host that has not started after this long is behind a firewall, or worse.
TIME_TO_START = 60.0
assert TIME_TO_START > HOST_IS_DEAD

# --- The command during a run -----------------------------------------------------------------

# What looks like the start of a launcher's message is held back until output pauses this long.
OUTPUT_PAUSE = 0.1
# The command looks at the clock this often. After a much longer gap it was stopped itself, and
# does not count what failed to arrive meanwhile as missing.
CLOCK_CHECK_INTERVAL = 1.0
GAP_OF_STOPPED_COMMAND = 3 * CLOCK_CHECK_INTERVAL
assert OUTPUT_PAUSE < CLOCK_CHECK_INTERVAL
assert TIME_FOR_CAUSE + CLOCK_CHECK_INTERVAL < TIME_TO_END_TOGETHER  # the clock shows both late

# --- The report of a run (--report) -----------------------------------------------------------

# It is written again at most this often, as ranks tell no news more often ...
SHORTEST_TIME_BETWEEN_PAGES = 5.0
# ... and less often as the run gets older and a page changes less: after this part of its age,
# but not so seldom that a reader would think that it has ended.
PART_OF_AGE_BETWEEN_PAGES = 0.05
LONGEST_TIME_BETWEEN_PAGES = 60.0
# With many ranks, or on a slow file system, writing takes longer: this many times as long passes
# before the next time, so that writing takes no more than half a percent of the command's time.
WRITINGS_BETWEEN_PAGES = 200

# --- The end of a run -------------------------------------------------------------------------

# A run that is asked to end, on whatever hosts, is gone within this time, unless its script
# handles SIGTERM and uses the grace period.
TIME_TO_END_RUN = 10.0
# A supervisor kills a rank that ignores SIGTERM ...
TIME_FROM_TERM_TO_KILL = 3
# ... before the command gives up on the ranks.
TIME_FOR_RANKS_TO_END = 4.0
assert TIME_FROM_TERM_TO_KILL < TIME_FOR_RANKS_TO_END
# Then come processes that outlive the ranks that started them, such as data workers,
TIME_FOR_WORKERS_TO_END = 2.0
# and what is left on other hosts, which are asked to kill it.
TIME_TO_CLEAN_UP_HOSTS = 4
assert TIME_FOR_RANKS_TO_END + TIME_FOR_WORKERS_TO_END + TIME_TO_CLEAN_UP_HOSTS <= TIME_TO_END_RUN
# A killed process is gone at once, unless the kernel is busy with it.
TIME_TO_BE_KILLED = 2.0
KILLED_CHECK_INTERVAL = 0.02
assert TIME_TO_BE_KILLED < TIME_TO_CLEAN_UP_HOSTS
# `--cleanup` asks the command of a run to end, which may take that long.
TIME_TO_CLEAN_UP = TIME_TO_END_RUN
CLEANUP_CHECK_INTERVAL = 0.05
# On a host that is cut off, the launcher and the supervisors end before their files are removed.
TIME_TO_END_CUT_OFF = 3.0 * TIME_FROM_TERM_TO_KILL
CUT_OFF_CHECK_INTERVAL = 0.1
# The clocks of file systems differ from ours by up to this much.
CLOCK_ERROR_OF_FILES = 2.0

# --- Other programs ---------------------------------------------------------------------------

# The first call of nvidia-smi on a cold machine takes several seconds, and so does the first
# start of mpiexec from a shared file system.
TIME_FOR_NVIDIA_SMI = 20
TIME_FOR_MPIEXEC_VERSION = 20
# A program that asks a host is terminated before it is killed, so that srun can end what it has
# started there.
TIME_FOR_QUESTION_TO_END = 1.0
# How long Open MPI's launcher may take to reach a host through the scheduler.
TIME_TO_REACH_HOST = 60

# --- TensorFlow's servers ---------------------------------------------------------------------

# How soon a server's socket is found after it listens, and how long it may take to. Until then it
# takes connections from all networks. A server may have several sockets.
LOOK_FOR_SERVER = 0.005
TIME_TO_START_SERVER = 60.0
TIME_FOR_MORE_SOCKETS = 0.5
# A rank that makes no progress looks whether its GPU computes what it is given within this time.
TIME_FOR_GPU_TO_ANSWER = 0.5
