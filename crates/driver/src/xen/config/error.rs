//! Errors of a configuration, with their place in the file.

// #syscall daemon openat,lseek: the configuration, read again
// #syscall daemon open@x86_64: the same, by a library that knows the older call
// #syscall daemon newfstatat 3-AT_EMPTY_PATH: whether a file is there

use std::io::{self, Read};
use std::path::{Path, PathBuf};

use super::effects::KEYS;

/// Maximum edit distance between an unknown key and the key that is suggested for it.
const EDITS_MAX: usize = 3;

/// Reasons for which there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: more than {limit} bytes, which is no configuration", path.display())]
    TooLarge {
        path: PathBuf,
        /// Maximum size in bytes.
        limit: u64,
    },
    /// Content is not valid.
    #[error("{}:{line}:{column}: {message}", path.display())]
    Content {
        path: PathBuf,
        /// Number of the line, from 1.
        line: usize,
        /// Position of the character in the line, from 1.
        column: usize,
        /// Fault, and the values that are valid.
        message: String,
    },
}

impl ConfigError {
    pub(super) fn is_missing_file(&self) -> bool {
        matches!(self, ConfigError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }

    pub(super) fn at(path: &Path, text: &str, error: &toml::de::Error) -> ConfigError {
        let span = error.span().unwrap_or(0..0);
        let before = text.get(..span.start).unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
        let found = text.get(span).unwrap_or_default();
        let message = reworded(error.message(), found);
        ConfigError::Content { path: path.to_owned(), line, column, message }
    }
}

/// Rewords the message of the TOML library for an unknown key. The library lists all known keys; this
/// suggests the one that was probably meant. Other messages stay.
fn reworded(message: &str, found: &str) -> String {
    if !message.starts_with("unknown field") {
        return message.to_owned();
    }
    let key = found.trim_matches(['"', '\'']);
    match suggestion(key) {
        Some(near) => format!("unknown key `{key}`; did you mean `{near}`?"),
        None => format!("unknown key `{key}`; the example configuration lists all that there are"),
    }
}

fn suggestion(key: &str) -> Option<&'static str> {
    // Underscores in place of dashes are the most common mistake.
    let key = key.replace('_', "-");
    let names = KEYS.iter().map(|(name, _)| name.rsplit('.').next().unwrap_or(name));
    let sections = [
        "serve", "network", "disks", "limits", "metrics", "device", "disk", "domain", "mac", "vdev",
    ];
    names
        .chain(sections)
        .map(|name| (strsim::damerau_levenshtein(name, &key), name))
        .filter(|(edits, name)| *edits <= EDITS_MAX && *edits < name.len())
        .min()
        .map(|(_, name)| name)
}

/// Reads a text file. Refuses one of more than `limit` bytes.
pub(super) fn read_bounded(path: &Path, limit: u64) -> Result<String, ConfigError> {
    let read = |source| ConfigError::Read { path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(read)?;
    let mut text = String::new();
    file.take(limit + 1).read_to_string(&mut text).map_err(read)?;
    if text.len() as u64 > limit {
        return Err(ConfigError::TooLarge { path: path.to_owned(), limit });
    }
    Ok(text)
}
