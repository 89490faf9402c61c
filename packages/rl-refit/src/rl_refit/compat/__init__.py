"""The reference's older calls, which go through the driver: `handles` and `broadcast`."""
