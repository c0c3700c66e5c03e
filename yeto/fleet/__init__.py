"""Fleets: which islands a budget buys, and how they are launched, watched and torn down.

SkyPilot rents the machines; nothing here provisions one. What is here: the words for an island, what one is
worth and costs, the best plan under a budget, the tasks that are handed to SkyPilot, and a registry of runs.
"""
