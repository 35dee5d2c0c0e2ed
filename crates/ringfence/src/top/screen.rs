//! Terminal of the live view: modes, output of cells, and keys.
//!
//! [`Screen::enter`] switches to the alternate screen and turns off echo, line editing and signals of keys. Dropping the
//! screen restores the terminal, and so does a panic, before its message is printed.

use std::fmt::{Display, Write as _};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use ratatui_core::backend::{Backend, ClearType, WindowSize};
use ratatui_core::buffer::Cell;
use ratatui_core::layout::{Position, Size};
use ratatui_core::style::{Color, Modifier};
use ringfence_sys::poll::wait_any;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

use super::app::Key;

/// Alternate screen, cleared, without a cursor.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[2J";
/// Plain characters, the cursor, the screen of before.
const LEAVE: &str = "\x1b[0m\x1b[?25h\x1b[?1049l";
/// Size of a terminal that does not know its own.
const SIZE_DEFAULT: Size = Size { width: 80, height: 24 };

/// Descriptors and former modes of the terminal.
struct Former {
    input: OwnedFd,
    output: OwnedFd,
    modes: Termios,
}

impl Former {
    fn restore(&self) {
        // A terminal that was hung up needs no restoration.
        let _ = write_all(&self.output, LEAVE.as_bytes());
        let _ = tcsetattr(&self.input, OptionalActions::Now, &self.modes);
    }
}

/// Terminal in the modes of the view.
pub(super) struct Screen {
    former: Arc<Former>,
    /// Output that was not written yet.
    pending: String,
}

impl Screen {
    /// Takes over a terminal. From now on a panic restores it.
    ///
    /// # Errors
    ///
    /// Fails if one of the descriptors is no terminal.
    pub(super) fn enter(input: OwnedFd, output: OwnedFd) -> io::Result<Screen> {
        let modes = tcgetattr(&input)?;
        let mut raw = modes.clone();
        raw.make_raw();
        let former = Arc::new(Former { input, output, modes });
        // The hook outlives the screen, which is then restored already.
        let (at_panic, hook) = (Arc::downgrade(&former), std::panic::take_hook());
        std::panic::set_hook(Box::new(move |panic| {
            at_panic.upgrade().iter().for_each(|former| former.restore());
            hook(panic);
        }));
        let screen = Screen { former, pending: String::new() };
        tcsetattr(&screen.former.input, OptionalActions::Now, &raw)?;
        write_all(&screen.former.output, ENTER.as_bytes())?;
        Ok(screen)
    }

    /// Returns the keys that were pressed. Call it when the input is readable.
    ///
    /// # Errors
    ///
    /// Fails if the terminal was hung up.
    pub(super) fn keys(&self) -> io::Result<Vec<Key>> {
        let mut bytes = [0; 256];
        match rustix::io::read(&self.former.input, &mut bytes) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => Ok(keys_of(&bytes[..read])),
            Err(Errno::AGAIN | Errno::INTR) => Ok(Vec::new()),
            Err(other) => Err(other.into()),
        }
    }
}

impl AsFd for Screen {
    /// Returns the input, for poll.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.former.input.as_fd()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.former.restore();
    }
}

/// Writes all bytes. Waits while a non-blocking terminal has no room.
fn write_all(output: &OwnedFd, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(output, bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::AGAIN) => {
                wait_any(&mut [PollFd::new(output, PollFlags::OUT)], None)?;
            }
            Err(Errno::INTR) => {}
            Err(other) => return Err(other.into()),
        }
    }
    Ok(())
}

/// Keys with an escape sequence of ECMA-48 (`ESC [`) or of the DEC terminals (`ESC O`), by the rest of it.
const SEQUENCES: [(&str, Key); 15] = [
    ("A", Key::Up),
    ("B", Key::Down),
    ("C", Key::Right),
    ("D", Key::Left),
    ("H", Key::Home),
    ("F", Key::End),
    ("Z", Key::BackTab),
    ("1~", Key::Home),
    ("7~", Key::Home),
    ("4~", Key::End),
    ("8~", Key::End),
    ("5~", Key::PageUp),
    ("6~", Key::PageDown),
    ("M", Key::Enter),
    ("3~", Key::Backspace),
];

/// Parses what a terminal sends for keys. Unknown sequences and bytes that are not UTF-8 are left out.
fn keys_of(bytes: &[u8]) -> Vec<Key> {
    let text = String::from_utf8_lossy(bytes);
    let mut keys = Vec::new();
    let mut rest: &str = &text;
    while let Some(c) = rest.chars().next() {
        if let Some(sequence) = rest.strip_prefix("\x1b[").or(rest.strip_prefix("\x1bO")) {
            // Parameters and intermediates, then one final character.
            let end = sequence.find(|c: char| ('@'..='~').contains(&c));
            let (found, after) = sequence.split_at(end.map_or(sequence.len(), |end| end + 1));
            keys.extend(SEQUENCES.iter().filter(|(name, _)| *name == found).map(|(_, key)| *key));
            rest = after;
            continue;
        }
        rest = &rest[c.len_utf8()..];
        keys.extend(match c {
            '\x1b' => Some(Key::Escape),
            '\r' | '\n' => Some(Key::Enter),
            '\t' => Some(Key::Tab),
            '\x7f' | '\x08' => Some(Key::Backspace),
            '\u{3}' => Some(Key::Char(c)),
            '\u{fffd}' => None,
            _ if c.is_control() => None,
            _ => Some(Key::Char(c)),
        });
    }
    keys
}

/// Colours that the view uses, in the numbers of ECMA-48.
fn colour(colour: Color) -> u8 {
    match colour {
        Color::Red => 31,
        Color::Yellow => 33,
        Color::Cyan => 36,
        _ => 39,
    }
}

/// Style of a cell: its colour and its modifiers.
type CellStyle = (Color, Modifier);

/// Returns the sequence that selects a style, whatever the one before.
fn sequence_of((fg, modifier): CellStyle) -> String {
    let mut sequence = "\x1b[0".to_owned();
    for (flag, number) in
        [(Modifier::BOLD, ";1"), (Modifier::UNDERLINED, ";4"), (Modifier::REVERSED, ";7")]
    {
        if modifier.contains(flag) {
            sequence.push_str(number);
        }
    }
    if fg != Color::Reset {
        // Writing to a `String` never fails.
        let _ = write!(sequence, ";{}", colour(fg));
    }
    sequence.push('m');
    sequence
}

impl Screen {
    fn push(&mut self, text: impl Display) {
        // Writing to a `String` never fails.
        let _ = write!(self.pending, "{text}");
    }
}

impl Backend for Screen {
    type Error = io::Error;

    fn draw<'a, I>(&mut self, content: I) -> io::Result<()>
    where
        I: Iterator<Item = (u16, u16, &'a Cell)>,
    {
        let mut style: Option<CellStyle> = None;
        let mut next = None;
        for (x, y, cell) in content {
            if next != Some((x, y)) {
                self.push(format_args!("\x1b[{};{}H", y + 1, x + 1));
            }
            // A wide character moves the cursor further: the next cell has its place named.
            next = cell.symbol().is_ascii().then_some((x + 1, y));
            let wanted = (cell.fg, cell.modifier);
            if style != Some(wanted) {
                style = Some(wanted);
                self.push(sequence_of(wanted));
            }
            self.push(cell.symbol());
        }
        if style.is_some() {
            self.push("\x1b[0m");
        }
        Ok(())
    }

    /// The cursor is never shown.
    fn hide_cursor(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn show_cursor(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn get_cursor_position(&mut self) -> io::Result<Position> {
        Ok(Position::ORIGIN)
    }

    fn set_cursor_position<P: Into<Position>>(&mut self, position: P) -> io::Result<()> {
        let Position { x, y } = position.into();
        self.push(format_args!("\x1b[{};{}H", y + 1, x + 1));
        Ok(())
    }

    fn clear(&mut self) -> io::Result<()> {
        self.clear_region(ClearType::All)
    }

    fn clear_region(&mut self, region: ClearType) -> io::Result<()> {
        self.push(match region {
            ClearType::All => "\x1b[2J",
            ClearType::AfterCursor => "\x1b[0J",
            ClearType::BeforeCursor => "\x1b[1J",
            ClearType::CurrentLine => "\x1b[2K",
            ClearType::UntilNewLine => "\x1b[0K",
        });
        Ok(())
    }

    fn size(&self) -> io::Result<Size> {
        let size = tcgetwinsize(&self.former.output)?;
        Ok(match (size.ws_col, size.ws_row) {
            (0, _) | (_, 0) => SIZE_DEFAULT,
            (width, height) => Size { width, height },
        })
    }

    fn window_size(&mut self) -> io::Result<WindowSize> {
        Ok(WindowSize { columns_rows: self.size()?, pixels: Size::ZERO })
    }

    fn flush(&mut self) -> io::Result<()> {
        let pending = std::mem::take(&mut self.pending);
        write_all(&self.former.output, pending.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, PoisonError};

    use ratatui_core::style::Style;
    use ratatui_core::terminal::Terminal;
    use rustix::fs::{Mode, OFlags};
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    use rustix::termios::LocalModes;

    use super::*;

    /// Lock of the tests with a screen: a panic in one restores the screens of all.
    static SCREENS: Mutex<()> = Mutex::new(());

    /// Terminal of a test: the end of whoever types, and the end of the program.
    fn pty() -> (OwnedFd, OwnedFd) {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        let keyboard = openpt(flags).unwrap();
        grantpt(&keyboard).unwrap();
        unlockpt(&keyboard).unwrap();
        let name = ptsname(&keyboard, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        (keyboard, rustix::fs::open(name, flags, Mode::empty()).unwrap())
    }

    fn enter(terminal: &OwnedFd) -> Screen {
        Screen::enter(terminal.try_clone().unwrap(), terminal.try_clone().unwrap()).unwrap()
    }

    fn shown(keyboard: &OwnedFd) -> String {
        let mut bytes = [0; 4096];
        let read = rustix::io::read(keyboard, &mut bytes).unwrap();
        String::from_utf8(bytes[..read].to_vec()).unwrap()
    }

    fn echoes(terminal: &OwnedFd) -> bool {
        tcgetattr(terminal).unwrap().local_modes.contains(LocalModes::ECHO | LocalModes::ICANON)
    }

    #[test]
    fn terminal_is_restored_when_the_screen_is_dropped() {
        let _alone = SCREENS.lock().unwrap_or_else(PoisonError::into_inner);
        let (keyboard, terminal) = pty();
        let screen = enter(&terminal);
        assert_eq!((shown(&keyboard).as_str(), echoes(&terminal)), (ENTER, false));
        drop(screen);
        assert_eq!((shown(&keyboard).as_str(), echoes(&terminal)), (LEAVE, true));
    }

    #[test]
    fn terminal_is_restored_at_a_panic_before_its_message() {
        let _alone = SCREENS.lock().unwrap_or_else(PoisonError::into_inner);
        let (keyboard, terminal) = pty();
        let screen = enter(&terminal);
        assert_eq!(shown(&keyboard), ENTER);
        // The screen lives longer than the panic: only the hook can restore the terminal.
        let caught = std::panic::catch_unwind(|| panic!("for the test"));
        assert!(caught.is_err());
        assert_eq!((shown(&keyboard).as_str(), echoes(&terminal)), (LEAVE, true));
        drop(screen);
    }

    #[test]
    fn cells_are_written_with_their_places_and_styles() {
        let _alone = SCREENS.lock().unwrap_or_else(PoisonError::into_inner);
        let (keyboard, terminal) = pty();
        let size = rustix::termios::Winsize { ws_row: 2, ws_col: 8, ws_xpixel: 0, ws_ypixel: 0 };
        rustix::termios::tcsetwinsize(&terminal, size).unwrap();
        let mut drawn = Terminal::new(enter(&terminal)).unwrap();
        shown(&keyboard);
        drawn
            .draw(|frame| {
                let red = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);
                let buffer = frame.buffer_mut();
                buffer.set_string(1, 0, "ab", Style::new());
                buffer.set_string(3, 0, "é", red);
                buffer.set_string(4, 0, "x", red);
            })
            .unwrap();
        let text = shown(&keyboard);
        assert!(text.contains("\x1b[1;2H\x1b[0mab\x1b[0;1;31mé\x1b[1;5Hx\x1b[0m"), "{text:?}");
    }

    #[test]
    fn keys_are_parsed_from_characters_and_sequences() {
        assert_eq!(keys_of(b"qR/"), ['q', 'R', '/'].map(Key::Char));
        assert_eq!(
            keys_of(b"\x1b[A\x1bOB\x1b[5~\x1b[Z"),
            [Key::Up, Key::Down, Key::PageUp, Key::BackTab]
        );
        assert_eq!(keys_of(b"\x1b"), [Key::Escape]);
        assert_eq!(
            keys_of("\r\t\x7fé\u{3}".as_bytes()),
            [Key::Enter, Key::Tab, Key::Backspace, Key::Char('é'), Key::Char('\u{3}')]
        );
        // Unknown keys, an incomplete sequence, other control characters and bytes that are not UTF-8.
        for unknown in [&b"\x1b[15~"[..], b"\x1b[1;5C", b"\x1b[", b"\x01\x00", b"\xff\xfe"] {
            assert_eq!(keys_of(unknown), [], "{unknown:?}");
        }
    }
}
