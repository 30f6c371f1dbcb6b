use super::*;

#[test]
fn tokens_in_a_row_are_spread_over_so_many_blocks() {
    for block_size in 1..6 {
        for tokens in 0..20 {
            let touched = |start: usize| match tokens {
                0 => 0,
                n => (start + n - 1) / block_size - start / block_size + 1,
            };
            let most = (0..block_size).map(touched).max().unwrap();
            assert_eq!(spanned_blocks(tokens, block_size), most);
        }
    }
}
