//! Random texts of many scripts, the same on every run.

#![allow(unreachable_pub, dead_code)]

/// A small generator (splitmix64): the same texts on every run.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (x ^ (x >> 31)) % bound
    }

    fn pick<'a, T: ?Sized>(&mut self, from: &[&'a T]) -> &'a T {
        from[self.below(from.len() as u64) as usize]
    }

    fn char_in(&mut self, first: u32, last: u32) -> char {
        char::from_u32(first + self.below(u64::from(last - first + 1)) as u32).unwrap_or('?')
    }

    /// A string of a few parts, each of another kind of text.
    pub fn text(&mut self) -> String {
        let mut text = String::new();
        for _ in 0..1 + self.below(8) {
            self.part(&mut text);
        }
        text
    }

    fn part(&mut self, text: &mut String) {
        let count = 1 + self.below(6);
        match self.below(16) {
            0 => {
                text.push_str(self.pick(&["'s", "'T", "'re", "'VE", "'lL", "'d", "'m", "'ſ", "'x"]))
            }
            1 => text.push_str(self.pick(&[
                " ",
                "  ",
                "\n",
                "\r\n",
                "\t",
                "\u{a0}",
                "\u{3000} ",
                " \n ",
                "\u{85}",
                "\u{2028}",
            ])),
            2 => text.extend((0..count).map(|_| self.char_in('0'.into(), '9'.into()))),
            3 => text.push_str(self.pick(&[
                "hello", " world", "The", " of", "ing", "HTTP", " für", "naïve", "…", "don't",
                " I'll",
            ])),
            4 => text.extend((0..count).map(|_| self.char_in('!'.into(), '~'.into()))),
            5 => text.extend((0..count).map(|_| self.char_in(0x400, 0x4FF))),
            6 => text.extend((0..count).map(|_| self.char_in(0x4E00, 0x9FFF))),
            7 => text.extend((0..count).map(|_| self.char_in(0x600, 0x6FF))),
            8 => text.extend((0..count).map(|_| self.char_in(0x900, 0x97F))),
            9 => text.extend((0..count).map(|_| self.char_in(0x1F300, 0x1FAFF))),
            10 => text.push_str(self.pick(&[
                "👩‍👩‍👧",
                "🇪🇺",
                "é",
                "e\u{301}",
                "a\u{308}\u{323}",
                "¼",
                "Ⅷ",
                "²",
                "٣",
                "\u{feff}",
                "\0",
                "\u{7f}",
            ])),
            11 => text.extend((0..count).map(|_| self.char_in(0xA0, 0x24F))),
            12 => text.extend((0..count).map(|_| self.char_in(0, 0x10FFFF))),
            13 => text.extend((0..count).map(|_| self.char_in(0xAC00, 0xD7A3))),
            14 => text.extend((0..count).map(|_| self.char_in('a'.into(), 'z'.into()))),
            _ => text.extend((0..count * 3).map(|_| ' ')),
        }
    }
}
