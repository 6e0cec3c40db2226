"""The engine: many sequences, one thread, one KV stream per slot.

`EngineWorker` is the thread and its two doors; `Engine.step` is the recipe of one step; `Scheduler` decides what goes
into its two calls; `SlotPool` knows what each slot still remembers. No locks in here but the mailbox's.
"""
