//! What the processes of a benchmark say: a line of JSON each time.

use std::io::{self, BufRead, BufReader};
use std::process::ChildStdout;
use std::sync::mpsc::{Receiver, channel};

use serde::de::DeserializeOwned;

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
