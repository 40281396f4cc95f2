"""What ran: the code, the packages and the machine of an attempt, and how two runs differ in them."""
