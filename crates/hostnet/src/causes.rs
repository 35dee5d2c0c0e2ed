//! Texts of errors with their causes.
//!
//! Many errors of the workspace name their cause in their own text and return it as `source()` too, so
//! `{error:#}` of anyhow prints it twice: "…: Permission denied (os error 13): Permission denied (os error
//! 13)". [`causes`] adds only causes that the text does not name yet. Everything that prints an error of
//! anyhow goes through here.

use crate::text::printable_lines;

/// Returns the text of an error, followed by those causes that the text does not name. It has no control characters: it may
/// quote what a guest or a peer wrote.
pub fn causes(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let own = cause.to_string();
        if text.is_empty() {
            text = own;
        } else if !text.contains(&own) {
            text.push_str(": ");
            text.push_str(&own);
        }
    }
    printable_lines(&text)
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::path::{Path, PathBuf};

    use anyhow::Context;

    use super::*;

    /// Error of the kinds that the workspace has.
    #[derive(Debug, thiserror::Error)]
    enum NamedError {
        #[error("cannot open {0}: {1}")]
        Open(&'static str, #[source] io::Error),
        #[error("cannot listen: {source}; choose another port")]
        Advice { source: io::Error },
        #[error(transparent)]
        Other(#[from] io::Error),
        #[error("nothing is said of the cause")]
        Silent(#[source] io::Error),
    }

    #[test]
    fn cause_is_printed_once_whether_or_not_the_error_names_it() {
        let denied = || io::Error::from_raw_os_error(13);
        let errors = [
            NamedError::Open("/dev/null", denied()),
            NamedError::Advice { source: denied() },
            NamedError::Other(denied()),
            NamedError::Silent(denied()),
        ];
        for error in errors {
            let error = Err::<(), _>(error).context("--disk x").context("launch").unwrap_err();
            let text = causes(&error);
            assert_eq!(text.matches("os error 13").count(), 1, "{text}");
            assert!(text.starts_with("launch: --disk x: "), "{text}");
        }
    }

    #[test]
    fn control_characters_of_a_cause_are_replaced() {
        let error = anyhow::anyhow!("a\u{9b}2J").context("b\u{1b}[2J\nc");
        assert_eq!(causes(&error), "b\u{fffd}[2J\nc: a\u{fffd}2J");
    }

    fn sources(directory: &Path, into: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, into);
            } else if path.extension().is_some_and(|ext| ext == "rs") {
                into.push(path);
            }
        }
    }

    #[test]
    fn no_source_file_prints_the_chain_of_anyhow() {
        let mut files = Vec::new();
        // The sandbox and others of the command's parts are crates beside this one.
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."), &mut files);
        assert!(files.len() > 100, "{}", files.len());
        let alternate = concat!("error", ":#}");
        for file in files.iter().filter(|file| !file.ends_with("causes.rs")) {
            let text = std::fs::read_to_string(file).unwrap();
            assert!(!text.contains(alternate), "{}: print causes(&error)", file.display());
        }
    }
}
