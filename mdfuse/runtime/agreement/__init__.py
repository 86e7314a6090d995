"""All ranks go on, or none: what they tell each other, when, and who raises.

Ranks meet in a store, never in a collective: a rank with a problem may not be able to post. At a
meeting each says None, or a text (`meetings.py`); what one says is an error of all: a rank with a
problem raises it, every other rank raises one that names that rank (`raise_alike`).

| when | what a rank says | where |
|---|---|---|
| it joins | why it cannot use the first backend, or has another than rank 0 | `joining.meet` |
| it joins, under nccl | why it has no fast lane | `fast_lane.agree_on_lanes` |
| another backend is opened | why it cannot use it | `Communicator.open` |
| before a program's first run | its problem, or a digest of what it runs | `programs.first_run` |
| where these digests differ | what it runs, line by line | `programs.agree` |
| when its first plan is made | its problem | `programs.agree` |
| after each run with `check_indices` | the index that is out of range | `programs.agree` |

No other run meets: a rank that refuses one leaves word, which a rank whose communication breaks
reads; and nobody runs on before it is known who had begun what (`refusals.py`). A run of another
thread breaks the order in which ranks meet (`crowds.py`).
"""
