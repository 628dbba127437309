"""foreseed as a Flower app: the coordinator in a ServerApp, a device's answer in a ClientApp."""
