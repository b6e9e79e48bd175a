"""How whence keeps things on disk. Every other room reads and writes through this one.

    files          atomic writes; JSON and arrays; schema versions; the wording of damage
    tensors        safetensors files with a checksum
    identity       digests of content, and the keys that caches are found by
    snapshots      when unfinished work is saved
    locks          one process at a time
    factor_cache   fitted factors, by key

This room imports nothing from the others.
"""
