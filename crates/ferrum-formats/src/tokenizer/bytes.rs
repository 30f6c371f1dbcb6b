//! The GPT-2 alphabet: one printable character for every byte.
//!
//! Bytes that are printable in Latin-1 stand for themselves; the other 68 are numbered from U+0100
//! on. A byte-level vocabulary is written in this alphabet, so that every token is valid text.

use std::sync::OnceLock;

const fn stands_for_itself(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// The character of each byte.
pub(super) fn alphabet() -> &'static [char; 256] {
    static ALPHABET: OnceLock<[char; 256]> = OnceLock::new();
    ALPHABET.get_or_init(|| {
        let mut chars = ['\0'; 256];
        let mut next = 0x100u32;
        for byte in 0..=255u8 {
            chars[byte as usize] = if stands_for_itself(byte) {
                char::from(byte)
            } else {
                next += 1;
                char::from_u32(next - 1).unwrap_or('\0')
            };
        }
        chars
    })
}

/// The byte that `c` stands for.
pub(super) fn byte_of(c: char) -> Option<u8> {
    match u32::from(c) {
        code @ 0..=0xFF => {
            let byte = code as u8;
            stands_for_itself(byte).then_some(byte)
        }
        code => {
            let rank = code.checked_sub(0x100)? as usize;
            (0..=255u8).filter(|&b| !stands_for_itself(b)).nth(rank)
        }
    }
}

/// `bytes` written in the alphabet.
pub(super) fn to_alphabet(bytes: &[u8]) -> String {
    let alphabet = alphabet();
    bytes.iter().map(|&b| alphabet[b as usize]).collect()
}

/// The bytes of a byte-level token; a character outside the alphabet gives its own UTF-8.
pub(super) fn from_alphabet(token: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(token.len());
    for c in token.chars() {
        match byte_of(c) {
            Some(byte) => out.push(byte),
            None => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
        }
    }
    out
}

/// The byte of a byte-fallback token `<0x41>`.
pub(super) fn fallback_byte(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let digits = hex.len() == 2 && hex.bytes().all(|b| b.is_ascii_hexdigit());
    digits.then(|| u8::from_str_radix(hex, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character() {
        for byte in 0..=255u8 {
            assert_eq!(byte_of(alphabet()[byte as usize]), Some(byte));
        }
        assert_eq!(to_alphabet(b" \n"), "ĠĊ");
        assert_eq!(byte_of('\u{ad}'), None);
        assert_eq!(from_alphabet("Ġ中"), " 中".as_bytes());
        assert_eq!(byte_of('\u{144}'), None);
    }

    #[test]
    fn fallback_tokens() {
        for (text, byte) in [
            ("<0x41>", Some(0x41)),
            ("<0xff>", Some(0xFF)),
            ("<0x+1>", None),
            ("<0x1>", None),
        ] {
            assert_eq!(fallback_byte(text), byte, "{text}");
        }
    }
}
