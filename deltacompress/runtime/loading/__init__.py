"""From the files of an artifact to the device, as fast as the bus allows."""
