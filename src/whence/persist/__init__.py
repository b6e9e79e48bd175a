"""How whence keeps things on disk. Every other room reads and writes through this one.

    files       atomic writes; JSON with a checksum; schema versions; when to save unfinished work
    arrays      .npy files, checked block by block
    tensors     safetensors files with a checksum; the cache of fitted factors
    identity    digests of content, and the keys that caches are found by
    locks       one process at a time, and who that is

This room imports nothing from the others.
"""
