//! What a backend has to write, checked against the list in the guide.

/// Traits of [`LlmBackend`](crate::LlmBackend), each with the file that defines it.
const TRAITS: [(&str, &str); 7] = [
    ("Backend", include_str!("core.rs")),
    ("BackendPagedKv", include_str!("paged.rs")),
    ("BackendKvDtype", include_str!("paged.rs")),
    ("BackendState", include_str!("state.rs")),
    ("BackendGraph", include_str!("graph.rs")),
    ("BackendSample", include_str!("sample.rs")),
    ("BackendCollective", include_str!("collective.rs")),
];

/// More would be a backend that few people write.
const MOST: usize = 25;

/// Names of the functions without a body in the definition of a trait.
fn required<'a>(name: &str, file: &'a str) -> Vec<&'a str> {
    let code = |line: &&str| !line.trim_start().starts_with("//");
    let mut lines = file.lines().filter(code);
    let begins = |line: &str| {
        let rest = line.strip_prefix("pub trait ")?.strip_prefix(name)?;
        rest.starts_with([':', '<']).then_some(())
    };
    assert!(
        lines.any(|line| begins(line).is_some()),
        "{name} is not there"
    );
    let mut functions = Vec::new();
    let mut open = None;
    for line in lines.take_while(|line| *line != "}") {
        if let Some(rest) = line.strip_prefix("    fn ") {
            open = rest.split(['(', '<']).next();
        }
        // A signature ends with a body or, where one is required, a semicolon.
        match line.as_bytes().last() {
            Some(b';') => functions.extend(open.take()),
            Some(b'{') => open = None,
            _ => {}
        }
    }
    functions
}

#[test]
fn the_guide_lists_the_required_functions() {
    let guide = include_str!("../../../../docs/adding-a-backend.md");
    let mut count = 0;
    for (name, file) in TRAITS {
        let functions = required(name, file);
        count += functions.len();
        let row = match functions.is_empty() {
            true => format!("| `{name}` | none |"),
            false => format!("| `{name}` | `{}` |", functions.join("`, `")),
        };
        assert!(guide.contains(&row), "the guide lacks the row\n{row}");
    }
    assert!(count <= MOST, "{count} functions are required");
    let sentence = format!("{count} functions are required");
    assert!(guide.contains(&sentence), "the guide lacks \"{sentence}\"");
}
