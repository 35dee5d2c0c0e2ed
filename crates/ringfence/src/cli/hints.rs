//! Hints for options of Docker, Podman, bubblewrap and pasta that `ringfence run` does not have.
//!
//! Without them the parser suggests to pass the option on to the command, which is rarely what was meant.

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};

/// Options of other programs, and what to use instead.
static HINTS: [(&[&str], &str); 10] = [
    (
        &["--rm", "--init"],
        "a guest leaves nothing behind, and has an init process: leave the option out",
    ),
    (
        &["-i", "-t", "--interactive", "--tty"],
        "the command has the terminal and the standard streams of `ringfence run`: leave the option out",
    ),
    (
        &["-e", "--env", "--setenv"],
        "the command has your environment; more by `-- env NAME=VALUE CMD`",
    ),
    (
        &["-d", "--detach"],
        "start it in the background by `&`; `ringfence wait`, `ps`, `exec`, `logs` and `stop` find it by its --name",
    ),
    (
        &["--net", "--network", "--unshare-net", "--share-net"],
        "`--switch NAME` connects guests, `--switch none --uplink none` leaves loopback alone; the host's network \
         is there by default",
    ),
    (&["-u", "--user", "--uid"], "the command has your own ids; `--as-root` makes it root inside"),
    (
        &["-w", "--workdir", "--chdir"],
        "the command starts in the current directory: `cd` there first",
    ),
    (
        &["--volume", "--mount", "--bind", "--ro-bind", "--dev-bind", "--read-only"],
        "the command has your files; `--ro PATH`, `--rw PATH`, `--hide PATH`, `--tmpfs PATH` and `--root DIR` limit it",
    ),
    (
        &["--privileged", "--cap-add"],
        "`--as-root` gives the command every capability over the guest's own network and mounts",
    ),
    (
        &["--security-opt", "--cap-drop"],
        "`--seccomp FILE|none` chooses the list of system calls; `--strict` denies namespaces and new privileges",
    ),
];

/// Replaces the parser's suggestion for an unknown option of `run` by a hint, if there is one.
pub fn explained<W: Iterator<Item = OsString>>(
    mut error: clap::Error,
    mut words: W,
) -> clap::Error {
    if error.kind() != ErrorKind::UnknownArgument || words.nth(1).is_none_or(|word| word != "run") {
        return error;
    }
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else {
        return error;
    };
    let found = HINTS.iter().find(|(names, _)| names.contains(&option.as_str()));
    if let Some((_, hint)) = found {
        let hint = ContextValue::StyledStrs(vec![(*hint).into()]);
        error.insert(ContextKind::Suggested, hint);
    }
    error
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::Cli;
    use super::*;

    fn said(words: &[&str]) -> String {
        let error = Cli::try_parse_from(words).unwrap_err();
        explained(error, words.iter().map(OsString::from)).to_string()
    }

    #[test]
    fn option_of_another_program_has_a_hint_in_place_of_the_parsers() {
        for (words, hint) in [
            (&["--rm"][..], "leaves nothing behind"),
            (&["-it"], "the terminal"),
            (&["-e", "A=b"], "env NAME=VALUE CMD"),
            (&["--network=none"], "--switch none --uplink none"),
        ] {
            let said = said(&[&["ringfence", "run"][..], words, &["--", "true"]].concat());
            assert!(said.contains(hint) && !said.contains("as a value"), "{words:?}: {said}");
        }
        assert!(said(&["ringfence", "run", "--nosuch"]).contains("unexpected argument"));
        assert!(!said(&["ringfence", "ps", "--rm"]).contains("leaves nothing"));
    }

    #[test]
    fn option_with_a_hint_is_none_of_run() {
        for name in HINTS.iter().flat_map(|(names, _)| *names) {
            let error = Cli::try_parse_from(["ringfence", "run", name, "--", "true"]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::UnknownArgument, "{name}");
        }
    }
}
