"""The supervisor: admits, starts, watches, stops, resumes and adopts runs."""
