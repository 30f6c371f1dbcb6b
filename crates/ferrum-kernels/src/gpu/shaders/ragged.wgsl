// The sequences of a ragged batch, whose shader binds their `query_starts`.

// The sequence of a token: the last that begins at it or before. Empty ones begin where the next
// does, so the last is the one that has the token.
fn sequence_of(seqs: u32, token: u32) -> u32 {
    var low = 0u;
    var high = seqs;
    while low + 1u < high {
        let middle = (low + high) / 2u;
        if query_starts[middle] <= i32(token) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}
