"""Server and devices over MQTT. Standard library, engine, wire and paho-mqtt only: a device loads this room."""
