"""Jobs that outlive those who submit them: each has an id, and is kept until somebody has acknowledged its outcome.

backend.QueueBackend      jobs of a Coordinator(queue=...): what it asks goes to the keeper
  v
keeper.Keeper             what becomes of each job: accepted, begun, ended, read, forgotten
  |  rules                what may happen to a job, as steps of a transaction
  |  readers              who has been given which outcome
  |  errand               a job while the engine has it, and its followers
  v
writer.Writer             one thread, one commit for all that has come in
  v
store.Store               the SQLite file, or the same in memory; lock: who has it
"""
