"""How whence keeps things on disk. Every other room reads and writes through this one.

    files       atomic writes; JSON and arrays; schema versions; when to save unfinished work
    tensors     safetensors files with a checksum; the cache of fitted factors
    identity    digests of content, and the keys that caches are found by
    locks       one process at a time

This room imports nothing from the others.
"""
