"""From a checkpoint to an EXL3 pack: calibration, trellis search, error feedback, reports."""
