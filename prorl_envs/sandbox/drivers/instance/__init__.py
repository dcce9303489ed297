"""The driver that runs one Apptainer per sandbox."""
