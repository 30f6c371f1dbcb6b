//! From the tokens of a window to segments, and to where the next window begins.

use ferrum_types::TokenId;

/// A part of a window's text. Times count from the beginning of the window, in steps of 20 ms.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TimedTokens {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) tokens: Vec<TokenId>,
}

/// Frames of a timestamp's step.
const FRAMES: usize = 2;

/// A window of `frames` frames as one segment.
pub(super) fn whole(tokens: &[TokenId], frames: usize) -> TimedTokens {
    TimedTokens {
        start: 0,
        end: frames / FRAMES,
        tokens: tokens.to_vec(),
    }
}

/// The segments of a window of `frames` frames, and how many frames further the next one begins.
pub(super) fn split(
    tokens: &[TokenId],
    first_timestamp: TokenId,
    frames: usize,
) -> (Vec<TimedTokens>, usize) {
    let is_time = |token: TokenId| token >= first_timestamp;
    let time = |token: TokenId| token.saturating_sub(first_timestamp) as usize;
    let ends_single = matches!(tokens, [.., before, last] if !is_time(*before) && is_time(*last));
    // Between two timestamps one segment ends and another begins.
    let pairs = tokens.windows(2).enumerate();
    let pairs = pairs.filter(|(_, pair)| is_time(pair[0]) && is_time(pair[1]));
    let mut borders: Vec<usize> = pairs.map(|(i, _)| i + 1).collect();
    if borders.is_empty() {
        let last = tokens.iter().rev().copied().find(|&token| is_time(token));
        let mut all = whole(tokens, frames);
        if let Some(token) = last.filter(|&token| token != first_timestamp) {
            all.end = time(token);
        }
        return (vec![all], frames);
    }
    if ends_single {
        borders.push(tokens.len());
    }
    let (mut segments, mut begin) = (Vec::new(), 0);
    let last = borders.len() - 1;
    for (i, &border) in borders.iter().enumerate() {
        // Without a single timestamp at the end, the last segment keeps the one that begins what is thrown away.
        let until = border + usize::from(i == last && !ends_single);
        let part = &tokens[begin..until];
        segments.push(TimedTokens {
            start: part.first().map_or(0, |&token| time(token)),
            end: time(tokens[border - 1]),
            tokens: part.to_vec(),
        });
        begin = border;
    }
    let moved = match ends_single {
        // There is no speech after it.
        true => frames,
        // What was begun and not ended is read again.
        false => time(tokens[begin - 1]) * FRAMES,
    };
    // A window that ends where it begins would be read for ever.
    (segments, if moved == 0 { frames } else { moved })
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: TokenId = 100;

    #[test]
    fn windows_move_to_the_last_timestamp() {
        let part = |start, end, tokens: &[TokenId]| TimedTokens {
            start,
            end,
            tokens: tokens.to_vec(),
        };
        for (tokens, segments, moved) in [
            (&[][..], vec![part(0, 1500, &[])], 3000),
            (&[1, 2], vec![part(0, 1500, &[1, 2])], 3000),
            (&[T, 1, 2], vec![part(0, 1500, &[T, 1, 2])], 3000),
            (&[T, 1, T + 40], vec![part(0, 40, &[T, 1, T + 40])], 3000),
            (
                &[T, 1, T + 40, T + 50, 2, T + 90],
                vec![
                    part(0, 40, &[T, 1, T + 40]),
                    part(50, 90, &[T + 50, 2, T + 90]),
                ],
                3000,
            ),
            (
                &[T, 1, T + 40, T + 50, 2],
                vec![part(0, 40, &[T, 1, T + 40, T + 50])],
                80,
            ),
            (&[T, T, 1], vec![part(0, 0, &[T, T])], 3000),
        ] {
            assert_eq!(split(tokens, T, 3000), (segments, moved), "{tokens:?}");
        }
    }
}
