"""EnvPool's C++ environments (`env.backend: envpool`): which there are (`catalogue`), and stepping them (`pool`)."""
