"""Where expert weights live: host records, device slots, the residency table and the copies between them."""
