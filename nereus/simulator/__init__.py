"""The executor in virtual time: policies over a trace of devices and response lengths, on clusters of any size."""
