"""The user's ``Trainer``, its checks, and the order of a fit.

May import: every room but ``summaries``. Must not know: how jobs, ranks and files are made.
"""
