"""All ranks go on, or none: their messages to each other, and the errors on all of them.

Ranks meet in a store, never in a collective: a rank with a problem may not be able to post. At a
meeting each says None, or a text (`meetings.py`). The text of one is an error of all: a rank with a
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

After a death the ranks that are left agree on who goes on (`epochs.py`), and join anew.

Other runs do not meet. A rank that refuses one leaves a message, which a rank whose communication
breaks reads; and no rank runs on before it is known which ranks had begun the run (`refusals.py`).
A run of another thread breaks the order in which ranks meet (`crowds.py`).
"""
