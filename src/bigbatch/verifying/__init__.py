"""The proof that an accumulated gradient is the big batch's, and the cause of each difference, found by experiment."""
