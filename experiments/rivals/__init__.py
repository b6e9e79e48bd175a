"""Methods of other papers, re-made on whence's own parts so that tables can have them.

A method that somebody would install whence for is in `whence.methods` instead.
"""
