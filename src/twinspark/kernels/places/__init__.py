"""Where rows of a step read and write, and their rotary angles, made on the device.

Read next: places.py.
"""
