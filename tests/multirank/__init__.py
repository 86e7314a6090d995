"""A pytest plugin for tests that run on several ranks at once.

A test marked `@pytest.mark.world(N)` runs on all ranks of a world of N. Where pytest itself is such
a world (mpirun, torchrun, srun), the ranks run it together and agree on its verdict (`joint.py`).
Where pytest is a single process, it hosts a world of N for all the tests that want one and reports
each test's verdict as its own (`hosting.py`).

Read in this order: plugin, selection, verdicts, joint, agreement, hosting, job, launchers.
"""
