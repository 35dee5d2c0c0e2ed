//! Soak test of a large file transfer, while the driver domain is stopped and continued at random.

use std::io::{Read, Write};
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use rustix::process::Signal;
use taskkit::exec::Cmd;

use super::testbed::{Process, Testbed};

/// Maximum duration of a stop, and of the time between two stops, in milliseconds.
const LONGEST_MS: u64 = 40;

pub(super) fn run(testbed: &Testbed, times: u32, mebibytes: u64) -> anyhow::Result<bool> {
    println!("soak transfer: {times} times {mebibytes} MiB; {}", testbed.describe());
    let file = testbed.file("file");
    write_noise(&file, mebibytes)?;
    let expected = first_word(&sum(&file)?);
    // The server's line for each request on standard error is discarded.
    let serve = "exec python3 -m http.server 2>/dev/null";
    let mut web = testbed.start(&["--name", "web"], &["sh", "-c", serve])?;
    let driver = web.process("driver")?;
    let (end, ended) = mpsc::channel::<()>();
    let disturbance = std::thread::spawn(move || disturb(driver, &ended));
    let mut wrong = 0;
    for round in 1..=times {
        let start = Instant::now();
        let fetch = "curl -sSf http://web:8000/file | sha256sum";
        let found = first_word(&testbed.run(&[], &["sh", "-c", fetch])?);
        let word = if found == expected { "right" } else { "WRONG" };
        wrong += u32::from(found != expected);
        println!("  {round:>3}: SHA-256 {word}, {:.1?}", start.elapsed());
    }
    drop(end);
    let stops = disturbance.join().map_err(|_| anyhow::anyhow!("the disturbance panicked"))??;
    println!("{} of {times} right; the driver domain was stopped {stops} times", times - wrong);
    web.end()?;
    Ok(wrong == 0 && stops > 0)
}

/// Stops and continues the driver domain until `end` is closed. Returns the number of stops.
fn disturb(driver: Process, end: &mpsc::Receiver<()>) -> anyhow::Result<u32> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
    let mut state = u64::from(now.subsec_nanos()) | 1;
    let mut pause = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        Duration::from_millis(state % LONGEST_MS)
    };
    let mut stops = 0;
    loop {
        driver.signal(Signal::STOP)?;
        std::thread::sleep(pause());
        driver.signal(Signal::CONT)?;
        stops += 1;
        if !matches!(end.recv_timeout(pause()), Err(mpsc::RecvTimeoutError::Timeout)) {
            return Ok(stops);
        }
    }
}

fn write_noise(path: &Path, mebibytes: u64) -> anyhow::Result<()> {
    let mut random = std::fs::File::open("/dev/urandom")?.take(mebibytes << 20);
    let mut file = std::fs::File::create(path)?;
    std::io::copy(&mut random, &mut file)?;
    Ok(file.flush()?)
}

fn sum(path: &Path) -> anyhow::Result<String> {
    let output = Cmd::new("sha256sum").args([path]).output(Path::new("."))?;
    output.map_err(anyhow::Error::msg).context("sha256sum")
}

fn first_word(text: &str) -> String {
    text.split_whitespace().next().unwrap_or_default().to_owned()
}
