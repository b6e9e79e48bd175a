"""How whence keeps things on disk. Every other room reads and writes through this one.

files       atomic writes; JSON with a checksum; schema versions; locks; when to save
arrays      .npy files, checked block by block; safetensors files with a checksum
identity    digests of content and of code, and the keys that caches are found by
cache       fitted factors, and the losses they belong to
"""
