//! What the processes of a benchmark say: a line of JSON each time.

use std::io::{self, BufRead, BufReader, Write};
use std::process::ChildStdout;
use std::sync::mpsc::{Receiver, channel};

use ringfence::causes::causes;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::STATUS_BENCH_FAILED;

/// Listens to a process until it ends or nobody wants to hear more; what is no JSON of that kind is heard as
/// `failed`, with the line.
///
/// # Errors
///
/// When there is no thread for it.
pub(super) fn listen<S: DeserializeOwned + Send + 'static>(
    output: ChildStdout,
    failed: fn(String) -> S,
) -> io::Result<Receiver<S>> {
    let (tell, said) = channel();
    std::thread::Builder::new().name("said".to_owned()).spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            let heard = serde_json::from_str(&line);
            let heard = heard.unwrap_or_else(|_| failed(format!("it said {line:?}")));
            if tell.send(heard).is_err() {
                return;
            }
        }
    })?;
    Ok(said)
}

/// Says it on standard output.
pub(super) fn say(what: &impl Serialize) -> anyhow::Result<()> {
    let mut line = serde_json::to_string(what)?;
    line.push('\n');
    let mut out = io::stdout().lock();
    out.write_all(line.as_bytes())?;
    Ok(out.flush()?)
}

/// The exit status of a process of a benchmark that came to that; a failure is said as well.
pub(super) fn exit_status<S: Serialize>(
    outcome: anyhow::Result<()>,
    failed: impl FnOnce(String) -> S,
) -> u8 {
    outcome.map_or_else(
        |error| {
            // When nobody hears it, nobody needs it.
            let _ = say(&failed(causes(&error)));
            STATUS_BENCH_FAILED
        },
        |()| 0,
    )
}
