"""The driver that runs one Apptainer per sandbox. Begin with `driver.py`."""
