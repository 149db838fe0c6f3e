"""The only room that knows Ray. What crosses a Ray call is plain values (elastic/wire.py)."""
