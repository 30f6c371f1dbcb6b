//! Short texts of the parser's errors.

/// The first line of an error, and the last if the first only introduces it. The text is shortened, as it is part of a
/// response.
pub(super) fn short_text(error: &str) -> String {
    const MAX_CHARS: usize = 300;
    let mut lines = error.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut line = lines.next().unwrap_or("no reason given").to_owned();
    // Lines after these show the text itself.
    if let Some(reason) = lines.find_map(|line| line.strip_prefix("error: ")) {
        line = format!("{line} {reason}");
    }
    if let Some((at, _)) = line.char_indices().nth(MAX_CHARS) {
        line.replace_range(at.., "…");
    }
    line
}
