"""Messages between server and devices over MQTT: the link, its topics, and the loop that drives either side.

Standard library, engine, wire and paho-mqtt only: a device loads this room.
"""
