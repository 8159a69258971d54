"""Runs of several processes: launchers: who starts them. rendezvous: they find each other. distributed: one run of all.
supervisor: a process that watches one. preemption: signals that ask for the end."""
