//! Loops of a constant count, written out.

/// Runs `$body` for each `$i` from 0 to `$count`, a constant of at most 12.
///
/// The compiler unrolls such loops by itself, but only after it has been through them as loops: written out, the
/// products of quantised weights are compiled in half the time.
macro_rules! unrolled {
    ($i:ident < $count:expr => $body:block) => {{
        const { assert!($count <= 12) };
        unrolled!(@ $i, $count, $body, 0 1 2 3 4 5 6 7 8 9 10 11);
    }};
    (@ $i:ident, $count:expr, $body:block, $($n:literal)*) => {
        $(if const { $n < $count } {
            let $i: usize = $n;
            $body
        })*
    };
}
pub(crate) use unrolled;
