"""The coordinator as a job queue inside a Python program.

sync.Coordinator, aio.AsyncCoordinator     what people use: the same jobs, blocking or awaited
  |  asking: fields -> GenerationRequest and JobOptions, by the table that batch files use
  |  roster: who is unfinished, and how many may be
job.Job                                    a future, also of text pieces (stream)
flow                                       map: rows in, results out, a window of them on their way
frames                                     map_frame: columns in and out
  v
backend.Backend                            whoever runs the jobs; local: an engine of this process
"""
