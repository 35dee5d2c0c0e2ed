//! Link times of the test programs, for `--durations`. A script called `cc`, first in the PATH of the build, calls the
//! linker and appends a line to a log: the duration in nanoseconds, and the file that was linked.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::built::Program;

/// Name of the program that rustc calls as a linker.
const LINKER: &str = "cc";

const SCRIPT: &str = r#"#!/bin/sh
start=$(date +%s%N)
'LINKER' "$@"
status=$?
end=$(date +%s%N)
while [ $# -gt 1 ]; do
    [ "$1" != -o ] || out=$2
    shift
done
[ -z "${out-}" ] || echo "$((end - start)) $out" >>'LOG'
exit $status
"#;

/// Directory with the script and its log.
pub(crate) struct Links {
    folder: PathBuf,
}

impl Links {
    /// Writes the script. Returns `None` if `path` has no linker, which the build reports.
    pub(crate) fn begin(folder: PathBuf, path: &OsStr) -> anyhow::Result<Option<Links>> {
        let mut places = std::env::split_paths(path).filter(|place| *place != folder);
        let Some(place) = places.find(|place| place.join(LINKER).is_file()) else {
            return Ok(None);
        };
        std::fs::create_dir_all(&folder)?;
        let links = Links { folder };
        std::fs::write(links.log(), "")?;
        let quote = |path: &Path| path.display().to_string().replace('\'', r"'\''");
        let script = SCRIPT.replace("LINKER", &quote(&place.join(LINKER)));
        let script = script.replace("LOG", &quote(&links.log()));
        let file = links.folder.join(LINKER);
        std::fs::write(&file, script)?;
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o755))?;
        Ok(Some(links))
    }

    fn log(&self) -> PathBuf {
        self.folder.join("log")
    }

    /// Returns a PATH with the script before the directories of `path`.
    pub(crate) fn path(&self, path: &OsStr) -> OsString {
        let places = std::iter::once(self.folder.clone()).chain(std::env::split_paths(path));
        // A directory whose name has a colon cannot be in a PATH. Then nothing is measured.
        std::env::join_paths(places).unwrap_or_else(|_| path.to_owned())
    }

    /// Returns name and link time of each program that was linked since [`Links::begin`], the longest time first.
    pub(crate) fn times(&self, programs: &[Program]) -> anyhow::Result<Vec<(String, Duration)>> {
        let log = std::fs::read_to_string(self.log())?;
        let mut times: Vec<_> = log.lines().filter_map(|line| time_of(line, programs)).collect();
        times.sort_by_key(|(_, time)| std::cmp::Reverse(*time));
        Ok(times)
    }
}

/// Returns the program of a line in the log, and the time.
fn time_of(line: &str, programs: &[Program]) -> Option<(String, Duration)> {
    let (nanoseconds, file) = line.split_once(' ')?;
    let program = programs.iter().find(|program| program.file == Path::new(file))?;
    Some((program.name(), Duration::from_nanos(nanoseconds.parse().ok()?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::built::Kind;
    use taskkit::exec::Cmd;

    #[test]
    fn link_is_measured_by_output_and_its_status_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let real = folder.path().join("it's real");
        std::fs::create_dir(&real).unwrap();
        let linker = real.join(LINKER);
        std::fs::write(&linker, "#!/bin/sh\n[ \"$1\" = 'a b' ] && exit 3\n").unwrap();
        std::fs::set_permissions(&linker, PermissionsExt::from_mode(0o755)).unwrap();
        let path = std::env::join_paths([real, "/usr/bin".into(), "/bin".into()]).unwrap();
        let links = Links::begin(folder.path().join("links"), &path).unwrap().unwrap();
        let call = |words: &[&str]| {
            let command = Cmd::new("sh").args(["-c", r#"cc "$@""#, "sh"]);
            let command = command.args(words.iter().copied()).env("PATH", links.path(&path));
            command.run_to_file(folder.path(), &folder.path().join("output")).unwrap()
        };
        assert_eq!(call(&["a b", "-o", "/t/net 1"]), 3);
        assert_eq!(call(&["c", "-o", "/t/other"]), 1);
        assert_eq!(call(&["--version"]), 1);
        let program = Program {
            krate: "net".to_owned(),
            target: "net".to_owned(),
            kind: Kind::Sources,
            file: "/t/net 1".into(),
            folder: "/".into(),
        };
        let times = links.times(&[program]).unwrap();
        assert_eq!(times.len(), 1);
        assert!(times[0].0 == "net" && times[0].1 > Duration::ZERO, "{times:?}");
    }
}
