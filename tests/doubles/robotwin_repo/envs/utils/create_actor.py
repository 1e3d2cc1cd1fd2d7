class UnStableError(Exception):
    pass
