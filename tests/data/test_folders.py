"""Folders of images: read, or refused in one line that names all files concerned."""

from __future__ import annotations

import json
import os
import shlex
import struct
import tempfile
from pathlib import Path
from zlib import compress, crc32

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutation import kills
from PIL import Image
from tiny import Train, tiny

from fedgen import cli
from fedgen.data.folders import folder
from fedgen.data.images import ReadOptions, read_images
from fedgen.data.partition import by_folder
from fedgen.errors import FedgenError
from fedgen.randomness import RandomStreams


def draw(place: Path, count: int, mode: str = "L", size: int = 8, name: str = "{}.png") -> None:
    """Write images of constant values from 1 on."""
    place.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        value = (i + 1) % 256
        colour = value if mode == "L" else (value,) * len(mode)
        Image.new(mode, (size, size), colour).save(place / name.format(i))


def read(path: object, **settings: object) -> object:
    return folder(RandomStreams.from_seed(0, "seeded"), None, path, **settings)


def test_a_folder_of_images(tmp_path: Path, streams: RandomStreams) -> None:
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for i in range(20):
            Image.new("RGB", (40, 50), (i, i, i)).save(tmp_path / label / f"{label}{i}.png")
    data = folder(streams, None, str(tmp_path), size=16)
    assert data.shape == (3, 16, 16)
    assert data.classes == 2
    assert len(data.labels) + len(data.test_labels) == 40
    with pytest.raises(FedgenError, match="square"):
        folder(streams, None, str(tmp_path))
    (tmp_path / "dog" / "torn.png").write_bytes(b"\x89PNG")
    with pytest.raises(FedgenError, match="1 of 41 files cannot be read as images"):
        folder(streams, None, str(tmp_path), size=16)
    draw(tmp_path / "dog", 1)
    with pytest.raises(FedgenError) as result:
        folder(streams, None, str(tmp_path))
    line = str(result.value)  # all that is wrong with images, and what to do about each, at once
    for word in ("torn.png", "grey images: 1, in colour: 40", "8x8, 40x50", "remove them"):
        assert word in line
    assert "data.channels=" in line and "data.size=" in line


@pytest.mark.parametrize(
    ("mode", "value", "suffix"), [("I;16", 4000, "png"), ("I", 4000, "tif"), ("F", 0.5, "tif")]
)
@pytest.mark.parametrize("channels", [None, 1, 3])
def test_images_of_more_than_eight_bits_are_refused(
    mode: str, value: float, suffix: str, channels: int | None, tmp_path: Path
) -> None:
    """Clamped at 255, they would be white."""
    draw(tmp_path / "a", 30)
    draw(tmp_path / "b", 30)
    Image.new(mode, (8, 8), value).save(tmp_path / "a" / f"deep.{suffix}")
    with pytest.raises(FedgenError, match=r"more than 8 bits a pixel.*: .*deep"):
        read(str(tmp_path), channels=channels)


def png_of_16_bits(pixels: np.ndarray) -> bytes:
    """Return an RGB image of 16 bits (h, w, 3), which Pillow reads as 8 bits."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc32(kind + data))

    high, wide = pixels.shape[:2]
    lines = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", wide, high, 16, 2, 0, 0, 0)
    parts = chunk(b"IHDR", head), chunk(b"IDAT", compress(lines)), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_colours_of_more_than_eight_bits_are_refused(tmp_path: Path) -> None:
    """The upper bytes of 12 bits in 16 would be nearly black."""
    draw(tmp_path / "a", 30)
    (tmp_path / "a" / "deep.png").write_bytes(png_of_16_bits(np.full((8, 8, 3), 4000)))
    with pytest.raises(FedgenError, match=r"more than 8 bits a pixel.*: .*deep"):
        read(str(tmp_path), channels=3)


def test_images_are_read_as_viewers_show_them(tmp_path: Path) -> None:
    """Rotated as the camera recorded, and white where they are transparent."""
    red, blue = (255, 0, 0), (0, 0, 255)
    photo = Image.new("RGB", (8, 8), red)
    photo.paste(blue, (0, 4, 8, 8))
    noted = Image.Exif()
    noted[0x0112] = 6  # to be turned by a quarter, clockwise
    photo.save(tmp_path / "turned.png", exif=noted)
    glass = Image.new("RGBA", (8, 8), (*red, 0))
    glass.paste((*blue, 255), (0, 0, 4, 8))
    glass.save(tmp_path / "glass.png")
    names = ("turned.png", "glass.png")
    sources = [(n, tmp_path / n) for n in names]
    turned, glass_ = read_images("here", sources, ReadOptions(channels=3)).images
    assert tuple(turned[:, 0, 0]) == tuple(turned[:, 7, 0]) == blue
    assert tuple(turned[:, 0, 7]) == tuple(turned[:, 7, 7]) == red
    assert tuple(glass_[:, 0, 0]) == blue
    assert tuple(glass_[:, 0, 7]) == (255, 255, 255)


def test_files_of_several_pages_are_refused(tmp_path: Path) -> None:
    draw(tmp_path / "a", 30)
    pages = [Image.new("L", (8, 8), grey) for grey in (1, 2, 3)]
    pages[0].save(tmp_path / "a" / "stack.tif", save_all=True, append_images=pages[1:])
    with pytest.raises(FedgenError, match=r"several images in a file: .*stack\.tif"):
        read(str(tmp_path))


def test_many_sizes_are_summarised_by_the_smallest_and_the_largest(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for side in range(10, 50):
        Image.new("L", (side, 2 * side)).save(tmp_path / "a" / f"{side}.png")
    with pytest.raises(FedgenError, match=r"40 sizes, 10 to 49 wide and 20 to 98 high"):
        read(str(tmp_path))


def test_images_in_nested_folders_are_refused(tmp_path: Path) -> None:
    draw(tmp_path / "a", 30)
    draw(tmp_path / "b", 30)
    (tmp_path / "b" / "empty").mkdir()
    assert read(str(tmp_path))
    draw(tmp_path / "b" / "scans", 3)
    with pytest.raises(FedgenError, match=r"are not read, such as aaaaa .*; move their images up"):
        read(str(tmp_path))


def test_images_next_to_label_folders_are_refused(tmp_path: Path) -> None:
    for label in ("a", "b"):
        draw(tmp_path / label, 30)
    (tmp_path / "metadata.csv").write_text("what is beside them and no image stays")
    assert read(str(tmp_path))
    draw(tmp_path, 3)
    with pytest.raises(FedgenError, match=r"have no label: .*; move them into one, or away"):
        read(str(tmp_path))


def test_changing_a_label_reassigns_no_other_image(tmp_path: Path, streams: RandomStreams) -> None:
    """A record is its file name; its subset follows from its position."""
    for label in ("a", "b", "c"):
        (tmp_path / label).mkdir()
    for i in range(30):
        Image.new("L", (8, 8), i).save(tmp_path / "abc"[i % 3] / f"{i}.png")
    before = folder(streams, None, str(tmp_path))
    (tmp_path / "a" / "12.png").rename(tmp_path / "c" / "12.png")
    after = folder(streams, None, str(tmp_path))
    assert np.array_equal(before.images, after.images)
    moved = (before.labels != after.labels).sum()
    moved += (before.test_labels != after.test_labels).sum()
    assert moved == 1
    assert not after.example_keys.moves


@kills(
    "fedgen/data/layouts.py",
    "replace(r, name=name) for r, name in zip(records, plain, strict=True)",
    (
        'replace(r, name=name if max(counts.values()) < 2 else f"{r.label}/{name}") '
        "for r, name in zip(records, plain, strict=True)"
    ),
)
@given(st.data())
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_an_additional_image_reassigns_no_other(
    tmp_path: Path, streams: RandomStreams, data: st.DataObject
) -> None:
    """Whatever its name, also that of an image of another label: the split of all others stays the
    same."""
    place = Path(tempfile.mkdtemp(dir=tmp_path))
    for label in "ab":
        (place / label).mkdir()
    for i in range(40):
        Image.new("L", (8, 8), i).save(place / "ab"[i % 2] / f"{i}.png")
    before = folder(streams, None, str(place))
    name = data.draw(st.sampled_from([f"{i}.png" for i in range(1, 40, 2)] + ["new.png"]))
    Image.new("L", (8, 8), 255).save(place / "a" / name)
    after = folder(streams, None, str(place))
    for was, now in ((before.images, after.images), (before.test_images, after.test_images)):
        assert np.array_equal(was, now[now[:, 0, 0, 0] != 255])


def test_a_folder_with_its_own_split(tmp_path: Path, streams: RandomStreams) -> None:
    for part, rows in (("train", 6), ("test", 2)):
        (tmp_path / part / "only").mkdir(parents=True)
        for i in range(rows):
            Image.new("L", (8, 8), i).save(tmp_path / part / "only" / f"{i}.png")
    data = folder(streams, str(tmp_path.parent), tmp_path.name)
    assert (len(data.labels), len(data.test_labels)) == (6, 2)


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    """Write two clients with two labels and the same file names."""
    for client, rows in (("north", 20), ("south", 30)):
        for label in ("ill", "well"):
            draw(tmp_path / "images" / client / label, rows)
    return tmp_path / "images"


def test_a_folder_named_twice_is_refused(hospitals: Path) -> None:
    """Each of its images would be two records, and the noise hides one."""
    place = hospitals / "north"
    with pytest.raises(FedgenError, match="one folder as two clients"):
        read([str(place), str(place / ".." / "north")])
    (hospitals / "west").symlink_to(place)
    with pytest.raises(FedgenError, match="one folder as two clients"):
        read(str(hospitals))


@pytest.mark.parametrize("several", [False, True])
def test_clients_are_folders(hospitals: Path, several: bool) -> None:
    """In one parent folder, or as several paths, also of equal names."""
    paths = [str(hospitals / name) for name in ("north", "south")]
    data = read(paths if several else str(hospitals))
    assert data.classes == 2
    assert data.writers is not None and set(data.writers) == {0, 1}
    assert len(data.labels) + len(data.test_labels) == 100
    shards = by_folder(data.labels, data.writers, None, RandomStreams.from_seed(0, "seeded"))
    assert [len(shard) for shard in shards] == [sum(data.writers == c) for c in (0, 1)]


def test_images_of_one_client_do_not_reassign_those_of_others(hospitals: Path) -> None:
    def mine() -> bytes:
        data = read(str(hospitals))
        return data.images[data.writers == 0].tobytes() + data.labels[data.writers == 0].tobytes()

    before = mine()
    draw(hospitals / "south" / "ill", 7, name="more{}.png")
    assert mine() == before


def test_one_name_under_several_labels_is_two_records(
    hospitals: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Methods of sums accept them. A method with replace-one neighbours refuses them: another label
    would be another position."""
    assert read(str(hospitals)).example_keys.moves
    words = ["data=folder", f"data.path={hospitals}", "data.public_rows=100", "rounds=2"]
    words.append("runtime=in_process")
    one = [*words, f"run_dir={tmp_path}/run"]
    critics = ["method=gs_wgan_small", *tiny("gs_wgan_small")]
    assert cli.run(["train", *critics, *one]) == 2
    assert "under several labels" in capsys.readouterr().err
    sums = ["method=dp_merf_small", *tiny("dp_merf_small"), "partition=by_folder"]
    assert cli.run(["train", *sums, *one, "privacy.aggregation=secure"]) == 0
    assert json.loads((tmp_path / "run" / "privacy.json").read_text())["clients"].keys() == {
        "0",
        "1",
    }


def test_hidden_files_are_ignored(tmp_path: Path) -> None:
    draw(tmp_path / "a", 12, name="ä{}.png")
    draw(tmp_path / ".thumbnails", 3)
    (tmp_path / "a" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "a" / "Thumbs.db").write_bytes(b"x")
    (tmp_path / "__MACOSX").mkdir()
    data = read(str(tmp_path))
    assert data.classes == 1 and len(data.labels) + len(data.test_labels) == 12


def test_grey_and_colour_images(tmp_path: Path) -> None:
    draw(tmp_path / "a", 20)
    draw(tmp_path / "b", 10, "RGB", name="b{}.png")
    draw(tmp_path / "b", 10, "RGBA", name="c{}.png")
    with pytest.raises(FedgenError, match="grey images: 20, in colour: 20"):
        read(str(tmp_path))
    assert read(str(tmp_path), channels=1).shape == (1, 8, 8)
    assert read(str(tmp_path), channels=3).shape == (3, 8, 8)


def test_all_unreadable_files_are_named(tmp_path: Path) -> None:
    draw(tmp_path / "a", 5)
    for name in ("torn.png", "notes.txt"):
        (tmp_path / "a" / name).write_bytes(b"\x89PNG")
    with pytest.raises(FedgenError, match=r"2 of 7 files .*notes\.txt.*torn\.png"):
        read(str(tmp_path))


def test_different_sizes_are_named_with_the_remedy(tmp_path: Path) -> None:
    draw(tmp_path / "a", 20)
    draw(tmp_path / "a", 20, size=9, name="b{}.png")
    with pytest.raises(FedgenError, match=r"8x8, 9x9.*data\.size"):
        read(str(tmp_path))
    assert read(str(tmp_path), size=8).shape == (1, 8, 8)


def test_a_label_without_images_stays_a_label(tmp_path: Path) -> None:
    """Labels are public and follow from folders, never from a record."""
    draw(tmp_path / "a", 20)
    draw(tmp_path / "b", 1)
    assert read(str(tmp_path)).classes == 2
    (tmp_path / "b" / "0.png").unlink()
    assert read(str(tmp_path)).classes == 2


def test_numbered_folders_are_in_numerical_order(tmp_path: Path) -> None:
    """Labels and clients; samples are written to folders of the same names."""
    for client in ("9", "10"):
        for label in range(12):
            draw(tmp_path / client / str(label), 3, name=f"{client}-{label}-{{}}.png")
    data = read(str(tmp_path))
    assert data.names == tuple(str(label) for label in range(12))
    one = read(str(tmp_path / "9"))
    assert one.names == data.names
    assert read(str(tmp_path / "9"), names=False).names is None


def test_names_that_are_not_unicode(tmp_path: Path) -> None:
    """A Latin-1 name is accepted for an image, and refused for a label, which is published."""
    draw(tmp_path / "a", 20)
    odd = os.fsdecode(b"caf\xe9")
    (tmp_path / "a" / "0.png").rename(tmp_path / "a" / f"{odd}.png")
    assert read(str(tmp_path)).classes == 1
    draw(tmp_path / odd, 20)
    with pytest.raises(FedgenError, match="not valid folder names") as raised:
        read(str(tmp_path))
    str(raised.value).encode()
    assert read(str(tmp_path), names=False).classes == 2


@pytest.mark.parametrize(("most", "warned"), [(1, True), (15, True), (200, False), (0, True)])
def test_a_small_range_of_pixels_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], most: int, warned: bool
) -> None:
    images = np.random.default_rng(0).integers(0, most + 1, (60, 8, 8), dtype=np.uint8)
    labels = np.arange(60) % 2
    rows = {"train_images": images, "train_labels": labels}
    np.savez(tmp_path / "a.npz", **rows, test_images=images, test_labels=labels)
    assert (
        cli.run(
            ["data", "check", f"data.path={tmp_path / 'a.npz'}", "data=folder", "data.classes=2"]
        )
        == 0
    )
    output = capsys.readouterr().out
    assert ("no pixel is above" in output or "all pixels are 0" in output) == warned


@pytest.mark.parametrize(
    "words",
    [
        ["partition=by_writer"],
        ["partition=iid", "partition.clients=1400"],
        ["partition=dirichlet", "partition.clients=200", "partition.alpha=0.01"],
        ["partition=shards", "partition.clients=2", "partition.classes_per_client=99"],
        ["partition=single", "partition.clients=3"],
        ["held_out=5000"],
        ["privacy.unit=person"],
    ],
)
def test_data_check_refuses_what_training_refuses(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["data", "check", "data=digits", *words]) == 2
    checked = capsys.readouterr().err
    assert cli.run(["account", "data=digits", "method=mixture_small", *words]) == 2
    assert capsys.readouterr().err == checked


def test_a_test_split_of_only_some_clients_is_refused(tmp_path: Path) -> None:
    for part in ("train", "test"):
        draw(tmp_path / "north" / part / "a", 5)
    draw(tmp_path / "south" / "a", 5)
    with pytest.raises(FedgenError, match="south has no train/ and test/"):
        read([str(tmp_path / "north"), str(tmp_path / "south")])
    for part in ("train", "test"):
        draw(tmp_path / "south" / part / "a", 4, name="s{}.png")
    (tmp_path / "east").mkdir()
    with pytest.raises(FedgenError, match="does not exist"):
        read([str(tmp_path / "north"), str(tmp_path / "west")])
    data = read([str(tmp_path / "north"), str(tmp_path / "south")])
    assert (len(data.labels), len(data.test_labels)) == (9, 9)


def test_paths_are_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(tmp_path / "mine" / "a", 20)
    monkeypatch.chdir(tmp_path)
    assert np.unique(read("mine").labels).tolist() == [0]


def test_public_counts_of_another_data_set_are_not_used(
    hospitals: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["account", "data=folder", f"data.path={hospitals}", "method.private_classifier=none"]
    sums = ("mixture", "dp_merf", "dp_hp", "dp_merf_ae", "central_images")
    for method in (*sums, "dpgan", "dp_wgan_gp", "psg", "dpdm"):
        own = words[:3] if method != "mixture" else words
        assert cli.run([*own, f"method={method}"]) == 2
        assert "data.public_rows: is not set" in capsys.readouterr().err
    assert cli.run([*words, "method=mixture", "data.public_rows=100"]) == 0


def test_an_invalid_public_count_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("abc", "0", "1.5"):
        assert cli.run(["account", "method=dp_merf_small", f"data.public_rows={value}"]) == 2
        assert "fedgen: data.public_rows: must be" in capsys.readouterr().err


def test_an_interpolated_number_is_validated(capsys: pytest.CaptureFixture[str]) -> None:
    """Against the default, like a number that is typed."""
    for key in ("rounds", "privacy.delta", "method.latent", "runtime.threads"):
        assert cli.run(["account", "method=dp_merf_small", f"{key}=${{names.method}}"]) == 2
        error = capsys.readouterr().err
        assert key in error and len(error.splitlines()) == 1


def test_suggested_settings_can_be_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw(tmp_path / "my photos, (2)" / "a b", 80)
    draw(tmp_path / "my photos, (2)" / "c", 80)
    monkeypatch.chdir(tmp_path)
    words = ["data=folder", "data.path='my photos, (2)'", "data.labels=['a b',c]"]
    assert cli.run(["data", "check", *words]) == 0
    [line] = [
        each for each in capsys.readouterr().out.splitlines() if each.startswith("suggested: ")
    ]
    pasted = shlex.split(line.removeprefix("suggested: fedgen train "))
    assert cli.run(["account", *pasted]) == 0
    assert "settings" not in capsys.readouterr().out
    assert cli.run(["account", *words, "method=dpgan_small", "data.public_rows=160"]) == 0
    assert "dpgan_small has the digits' settings" in capsys.readouterr().out


def test_suggestions_for_known_data_contain_no_count(capsys: pytest.CaptureFixture[str]) -> None:
    """Its own count is exact and public."""
    assert cli.run(["data", "check", "data=digits"]) == 0
    output = capsys.readouterr().out
    fits = "suggested: fedgen train data=digits method=mixture method.private_classifier=none "
    fits += "privacy.target_epsilon="
    assert fits in output


def test_partition_by_folder_needs_folders_of_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw(tmp_path / "a", 20)
    words = ["data=folder", f"data.path={tmp_path}", "partition=by_folder"]
    assert cli.run(["account", *words]) == 2
    assert "by_folder needs clients' folders" in capsys.readouterr().err


def test_data_check_describes_the_data_and_suggests_settings(
    hospitals: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["data", "check", "data=folder", f"data.path={hospitals}"]) == 0
    output = capsys.readouterr().out
    assert (
        "8x8 grey" in output
        and "data.public_rows=" in output
        and "2 clients" in output
        and "partition=by_folder" in output
    )
    assert f"suggested: fedgen train data=folder data.path={hospitals} method=mixture " in output
    assert "under several labels" in output and "private" in output
    assert cli.run(["data", "check", "data=folder", f"data.path={hospitals}/none"]) == 2
    assert "does not exist" in capsys.readouterr().err
    words = ["data=folder", f"data.path={hospitals}", "partition=iid", "partition.clients=-1"]
    assert cli.run(["data", "check", *words]) == 2
    assert "partition.clients: must be positive" in capsys.readouterr().err
    assert cli.run(["data", "look"]) == 2
    assert "fedgen data check" in capsys.readouterr().err


def test_labels_keep_their_numbers_at_all_sites(hospitals: Path) -> None:
    """If a site lacks a label, the numbers of its other labels stay the same."""
    north = str(hospitals / "north")
    data = read(north, labels=["healthy", "ill", "well"])
    assert data.classes == 3
    assert set(data.labels) == {1, 2}
    with pytest.raises(FedgenError, match=r"data\.labels: lacks labels of the data: well"):
        read(north, labels=["ill"])


def test_a_file_that_is_not_a_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Named by its setting, with the accepted formats."""
    draw(tmp_path, 1)
    torn = tmp_path / "torn.npz"
    torn.write_bytes(b"PK")
    lacking = tmp_path / "lacking.npz"
    np.savez(lacking, images=np.zeros(3))
    for file, why in (
        (tmp_path / "0.png", "a table (.csv, .parquet), a .tar or an .npz"),
        (torn, "is not a readable npz file"),
        (lacking, "lacks train_images"),
    ):
        words = ["data=folder", f"data.path={file}", "data.classes=2"]
        assert cli.run(["data", "check", *words]) == 2
        error = capsys.readouterr().err
        assert error.startswith("fedgen: data.path: ") and why in error


def test_a_rehearsal_warns_of_low_utility(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run for release prints nothing that follows from private images."""
    for label, count in (("a", 80), ("b", 12)):
        draw(tmp_path / "images" / label, count)
    data = ["data=folder", f"data.path={tmp_path / 'images'}", "method=mixture_small"]
    warnings = (
        "method.rows = 1,400 is far from",
        "fewer than 50 images of label b: mostly noise",
    )
    train(*data, "data.public_rows=1400", name="seeded")
    output = capsys.readouterr().out
    assert all(each in output for each in warnings)
    train(*data, "data.public_rows=1400", "privacy.noise=secure", name="secure")
    assert "warning" not in capsys.readouterr().out
    for label in ("a", "b"):
        draw(tmp_path / "more" / label, 80)
    more = ["data=folder", f"data.path={tmp_path / 'more'}", "method=mixture_small"]
    train(*more, "data.public_rows=150", name="enough")
    assert "warning" not in capsys.readouterr().out
