//! Server-sent events: it does not matter where chunks of a stream end, and a text that is written as an event is
//! read as it was.
#![no_main]

use ferrum_client::http::Events;
use libfuzzer_sys::fuzz_target;

/// What a stream in chunks comes to; `None` where it is refused.
fn read<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> Option<Vec<String>> {
    let mut events = Events::default();
    let mut found = Vec::new();
    for chunk in chunks {
        found.extend(events.push(chunk).ok()?);
    }
    Some(found)
}

// The length of chunks, and the stream.
fuzz_target!(|data: &[u8]| {
    let [length, stream @ ..] = data else {
        return;
    };
    let whole = read([stream]);
    assert_eq!(read(stream.chunks(usize::from(*length).max(1))), whole);
    assert_eq!(read(stream.chunks(1)), whole);
    if let Some(events) = whole {
        let bytes: usize = events.iter().map(String::len).sum();
        assert!(bytes <= stream.len());
    }
    let text = String::from_utf8_lossy(stream).replace('\r', "");
    let lines = text.split('\n').map(|line| format!("data: {line}\n"));
    let event = lines.collect::<String>() + "\n";
    assert_eq!(read([event.as_bytes()]), Some(vec![text]));
});
