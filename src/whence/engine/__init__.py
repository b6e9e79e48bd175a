"""Where methods run: one run of a study laid out on a device, scored block by block."""
