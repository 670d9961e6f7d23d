"""Pure maths on tensors: no distributed calls, nothing of ours imported. Keyword-only wherever arguments could swap.

Shape suffixes: T response tokens of one sample or of a whole micro-batch laid end to end, B bins, N samples. Masks are
1 for a trainable token and 0 otherwise. A non-finite number outside the mask never reaches a result or a gradient; one
inside the mask always surfaces.
"""
