"""How results are kept: atomic files, checksums, snapshots, identities."""
