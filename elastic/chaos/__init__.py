"""Disturbing a whole job on purpose and judging what became of it: `everstep chaos` and `everstep replay`.

What decides is pure (draw, conduct, availability, figures, promises); `sitting` starts the job and does what they say.
"""
