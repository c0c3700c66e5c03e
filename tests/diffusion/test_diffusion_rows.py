"""Rows of pictures, latents and prompts: what they become, and what is refused in which words."""

import io
import json
import os
import struct
import zlib

import numpy as np
import pytest
import torch
from diffusion_rows import as_row, cached_row, picture
from PIL import Image
from safetensors.torch import save_file

from yeto.diffusion import images
from yeto.diffusion.rows import RowReader, folder_of
from yeto.diffusion.values import RowNeeds
from yeto.errors import ConfigError, DataError


@pytest.fixture
def reader(tmp_path):
    return RowReader(RowNeeds(), folder=tmp_path)


def loaded(reader, value):
    return reader.load(reader.plan(as_row(value)))


def whole(image):
    """Return a picture's values as the tensor that it should become."""
    values = torch.from_numpy(np.array(image.convert("RGB"), dtype=np.float32))
    return (values / 127.5 - 1.0).permute(2, 0, 1)


# What rows become.


@pytest.mark.parametrize("name", ["a.png", "a.bmp"])
def test_a_picture_becomes_its_pixels(tmp_path, reader, name):
    image = picture(6, 10)
    image.save(tmp_path / name)
    example = loaded(reader, {"image": name, "prompt": "a"})
    assert example.pixels.shape == (3, 6, 10)
    assert example.pixels.dtype == torch.float32
    assert torch.equal(example.pixels, whole(image))
    assert (example.prompt, example.latents, example.conditioning) == ("a", None, None)
    assert example.origin == "rows.jsonl line 1"


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr"])
def test_pictures_of_every_kind_have_three_channels(tmp_path, reader, mode):
    kind = "tiff" if mode in ("CMYK", "YCbCr") else "png"
    image = picture(4, 4).convert(mode)
    data = io.BytesIO()
    image.save(data, format="jpeg" if kind == "tiff" else "png")
    (tmp_path / "a").write_bytes(data.getvalue())
    pixels = loaded(reader, {"image": "a", "prompt": ""}).pixels
    assert torch.equal(pixels, whole(Image.open(io.BytesIO(data.getvalue()))))


def test_transparent_parts_are_white_whatever_lies_below_them(tmp_path, reader):
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 255, 0))
    image.save(tmp_path / "a.png")
    pixels = loaded(reader, {"image": "a.png", "prompt": ""}).pixels
    assert pixels[:, 0, 0].tolist() == [1.0, -1.0, -1.0]
    assert pixels[:, 0, 1].tolist() == [1.0, 1.0, 1.0]


def test_a_picture_is_turned_as_its_camera_says(tmp_path, reader):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn a quarter to the right
    picture(8, 16).save(tmp_path / "a.png", exif=exif)
    example = loaded(reader, {"image": "a.png", "prompt": ""})
    assert example.pixels.shape == (3, 16, 8)
    expected = whole(picture(8, 16)).rot90(-1, (1, 2))
    assert torch.equal(example.pixels, expected)


@pytest.mark.parametrize("value", ["path", "bytes", "struct", "decoded"])
def test_where_a_picture_may_stand(tmp_path, reader, value):
    image = picture(4, 4)
    image.save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    kinds = {
        "path": str(tmp_path / "a.png"),
        "bytes": data,
        "struct": {"bytes": data, "path": "elsewhere.png"},
        "decoded": image,
    }
    planned = reader.plan(as_row({"image": kinds[value], "prompt": ""}))
    assert torch.equal(reader.load(planned).pixels, whole(image))
    assert (planned.held_bytes > 0) == (value != "path")


def test_stretching_and_cropping(tmp_path):
    # Left half black, right half white: a crop of the middle keeps both, a stretch as well, at other widths.
    image = Image.new("RGB", (16, 4), "black")
    image.paste("white", (4, 0, 12, 4))
    image.save(tmp_path / "a.png")
    row = as_row({"image": "a.png", "prompt": ""})
    found = {}
    for mode in ("stretch", "center-crop"):
        reader = RowReader(RowNeeds(), folder=tmp_path, height=4, width=4, resize_mode=mode)
        found[mode] = reader.load(reader.plan(row)).pixels
        assert found[mode].shape == (3, 4, 4)
    assert torch.all(found["center-crop"] == 1.0), "the middle is white"
    assert found["stretch"][0, 0, 0] < -0.5, "the sides are squeezed in, and black"
    assert found["stretch"][0, 0, 1] > 0.5


def test_whose_size_counts(tmp_path):
    picture(8, 16).save(tmp_path / "a.png")
    row = {"image": "a.png", "prompt": ""}
    reader = RowReader(RowNeeds(size_multiple=4), folder=tmp_path)
    assert reader.plan(as_row(row)).shape.image == (3, 8, 16)
    sized = row | {"height": 4, "width": 8}
    assert loaded(reader, sized).pixels.shape == (3, 4, 8)
    flags = RowReader(RowNeeds(size_multiple=4), folder=tmp_path, height=12, width=12)
    assert loaded(flags, sized).pixels.shape == (3, 12, 12)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_cached_tensors_are_float32_and_their_own(tmp_path, reader, stored):
    row, tensors = cached_row(tmp_path, 3, pooled=6, mask=True)
    narrow = {name: t if t.dtype == torch.bool else t.to(stored) for name, t in tensors.items()}
    save_file(narrow, tmp_path / "3.safetensors")
    example = loaded(reader, row | {"prompt": "what it was", "image": "gone.png"})
    assert torch.equal(example.latents, narrow["latents"].float())
    assert example.latents.dtype == example.conditioning.prompt_embeds.dtype == torch.float32
    assert torch.equal(example.conditioning.prompt_embeds, narrow["prompt_embeds"].float())
    assert torch.equal(example.conditioning.pooled, narrow["pooled_prompt_embeds"].float())
    assert torch.equal(example.conditioning.mask, tensors["prompt_mask"])
    assert (example.pixels, example.prompt) == (None, None)


def test_tensors_as_lists_and_in_files_with_many(tmp_path, reader):
    tensors = {"a.0": torch.randn(2, 2, 2), "b.0": torch.randn(3, 4)}
    save_file(tensors, tmp_path / "many.safetensors")
    row = {
        "latents": {"file": "many.safetensors", "tensor": "a.0"},
        "prompt_embeds": tensors["b.0"].tolist(),
        "prompt_mask": [1, 1, 0],
    }
    example = loaded(reader, json.loads(json.dumps(row)))
    assert torch.equal(example.latents, tensors["a.0"])
    assert torch.equal(example.conditioning.prompt_embeds, tensors["b.0"])
    assert example.conditioning.mask.tolist() == [True, True, False]


def test_a_picture_with_cached_words_and_latents_with_words(tmp_path, reader):
    picture(4, 4).save(tmp_path / "a.png")
    row, _ = cached_row(tmp_path, 0)
    first = reader.plan(as_row({"image": "a.png", "prompt_embeds": row["prompt_embeds"]}))
    second = reader.plan(as_row({"latents": row["latents"], "prompt": "a"}))
    assert (first.shape.is_latents, first.shape.prompt) == (False, (5, 8))
    assert (second.shape.is_latents, second.shape.prompt) == (True, None)


def test_planning_reads_no_values(tmp_path, reader):
    """A picture or a tensor that is cut short is planned: only loading it finds out."""
    data = io.BytesIO()
    picture(64, 64).save(data, format="png")
    (tmp_path / "a.png").write_bytes(data.getvalue()[:200])
    planned = reader.plan(as_row({"image": "a.png", "prompt": ""}))
    assert planned.shape.image == (3, 64, 64)
    with pytest.raises(DataError, match=r"line 1: image .*a.png cannot be read: "):
        reader.load(planned)


# What is refused.

NEEDS = RowNeeds(
    size_multiple=8, latent_channels=4, latent_multiple=2, prompt_width=8, pooled_width=6, needs_mask=True
)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"latents": None}, "neither image nor latents, only pooled_prompt_embeds, prompt_embeds, prompt_m"),
        ({"prompt_embeds": None}, "prompt_mask without prompt_embeds; give both or neither"),
        ({"prompt_mask": None}, "prompt_embeds without prompt_mask, which this model takes; cache the rows"),
        ({"pooled_prompt_embeds": None}, "prompt_embeds without pooled_prompt_embeds, which this model"),
        ({"latents": 3}, "latents is neither a list of numbers, nor a .safetensors file, nor"),
        ({"latents": {"tensor": "a"}}, "latents is neither a list of numbers"),
        ({"latents": "no.safetensors"}, "latents .*no.safetensors: No such file"),
        ({"latents": "."}, "latents .*: not a file"),
        ({"latents": "a\0b"}, "latents .*embedded null"),
        ({"latents": "pipe"}, "latents .*pipe: not a file"),
        ({"latents": "https://example.org/a.safetensors"}, "an address; download it, and name the file"),
        ({"latents": "junk.safetensors"}, "junk.safetensors is no readable safetensors file"),
        ({"latents": {"file": "0.safetensors", "tensor": "x"}}, "0.safetensors has no tensor x"),
        ({"latents": "i32.safetensors"}, "latents is of dtype I32; it must be one of F32, F16, BF16"),
        ({"latents": "flat.safetensors"}, r"latents has shape \(4, 4\); it must be \(channels, height, wid"),
        ({"latents": "empty.safetensors"}, r"latents has shape \(4, 0, 4\); it must have 1 to"),
        ({"latents": "wide.safetensors"}, "latents have 16 channels, this model's have 4; cache the rows"),
        ({"latents": "odd.safetensors"}, "latents are 4 x 5, this model takes multiples of 2"),
        ({"latents": "nan.safetensors"}, "latents has NaN or infinite values; make it anew"),
        ({"latents": []}, "latents has 0 numbers"),
        ({"latents": [[[1.0], [1.0, 2.0]]]}, "latents has lists of different lengths"),
        ({"latents": [[["1.0"]]]}, "latents has something in it that is no number"),
        ({"latents": [[[True]]]}, "latents has something in it that is no number"),
        ({"latents": [[[None]]]}, "latents has something in it that is no number"),
        ({"latents": [[[10**400]]]}, "latents has something in it that is no number"),
        ({"latents": [[[1e300]] * 4] * 4}, "latents has NaN or infinite values"),
        ({"prompt_embeds": [[1.0] * 9]}, "prompt_embeds have width 9, this model's have 8"),
        ({"pooled_prompt_embeds": [1.0]}, "pooled_prompt_embeds have width 1, this model's have 6"),
        ({"prompt_mask": [1, 1]}, "prompt_mask is of 2 tokens, prompt_embeds of 5"),
        ({"prompt_mask": [1, 1, 2, 0, 0]}, "prompt_mask has other values than 0 and 1"),
        ({"prompt_mask": [0] * 5}, "prompt_mask heeds no token at all"),
        ({"prompt_embeds": None, "prompt_mask": None, "pooled_prompt_embeds": None}, "neither prompt nor"),
        ({"prompt_embeds": "foreign.safetensors"}, "made with another model than --model is; cache the rows"),
        ({"prompt_embeds": "vague.safetensors"}, "does not say in JSON which model made it"),
    ],
)
def test_cached_rows_that_are_refused(tmp_path, change, problem):
    row, _ = cached_row(tmp_path, 0, pooled=6, mask=True)
    (tmp_path / "junk.safetensors").write_bytes(b"\xff" * 64)
    os.mkfifo(tmp_path / "pipe")
    for name, tensor in {
        "i32": torch.ones(4, 4, 4, dtype=torch.int32),
        "flat": torch.ones(4, 4),
        "empty": torch.ones(4, 0, 4),
        "wide": torch.ones(16, 4, 4),
        "odd": torch.ones(4, 4, 5),
        "nan": torch.full((4, 4, 4), torch.nan),
    }.items():
        save_file({"latents": tensor}, tmp_path / f"{name}.safetensors")
    for name, made_by in {"foreign": json.dumps({"digest": "b"}), "vague": "{"}.items():
        embeds = {"prompt_embeds": torch.ones(5, 8)}
        save_file(embeds, tmp_path / f"{name}.safetensors", metadata={"yeto_model": made_by})
    reader = RowReader(
        RowNeeds(
            size_multiple=8,
            latent_channels=4,
            latent_multiple=2,
            prompt_width=8,
            pooled_width=6,
            needs_mask=True,
            model={"digest": "a"},
        ),
        folder=tmp_path,
    )
    loaded(reader, row)
    value = {name: part for name, part in (row | change).items() if part is not None}
    with pytest.raises(DataError, match=problem) as caught:
        loaded(reader, value)
    assert str(caught.value).startswith("rows.jsonl line 1: ")
    assert "\n" not in str(caught.value)


def test_a_cache_that_names_its_model_in_other_words_is_taken(tmp_path):
    tensors = {"latents": torch.ones(4, 4, 4), "prompt_embeds": torch.ones(5, 8)}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"yeto_model": '{"hub_id": "a", "commit": "b"}'})
    reader = RowReader(RowNeeds(model={"digest": "a"}), folder=tmp_path)
    assert loaded(reader, dict.fromkeys(tensors, "a.safetensors")).latents is not None


def png(width, height, depth=8, kind=2):
    """Return a PNG that says a size and has no pixels."""

    def chunk(name, data):
        body = name + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"image": None}, "neither image nor latents, only prompt; add one, or remove the row"),
        ({"image": None, "prompt": None}, "neither image nor latents, only nothing"),
        ({"image": 7}, "image is no path of a file"),
        ({"image": ""}, "image is no path of a file"),
        ({"image": {"path": None}}, "image is no path of a file"),
        ({"image": "no.png"}, "image .*no.png: No such file"),
        ({"image": "pipe"}, "image .*pipe: not a file"),
        ({"image": "s3://bucket/a.png"}, "an address; download it, and name the file"),
        ({"image": "text.png"}, "text.png is no PNG, JPEG, WEBP, BMP picture"),
        ({"image": b"no picture"}, "image is no PNG, JPEG, WEBP, BMP picture"),
        ({"image": "a.gif"}, "a.gif is no PNG, JPEG, WEBP, BMP picture"),
        ({"image": "bomb.png"}, "bomb.png has more than 134217728 pixels"),
        ({"image": "large.png"}, r"large.png is 12000 x 12000, more than 134217728 pixels"),
        ({"image": "deep.png"}, "deep.png is of mode I;16; save it with eight bits a channel"),
        ({"image": "hollow.png"}, "hollow.png cannot be read: "),
        ({"image": "odd.png"}, r"9 x 8 \(height x width\): this model takes multiples of 8 up to 16384"),
        ({"height": 8}, "height and width must be whole numbers, both or neither"),
        ({"height": 8.0, "width": 8}, "height and width must be whole numbers, both or neither"),
        ({"height": 0, "width": 8}, r"0 x 8 \(height x width\): this model takes multiples of 8"),
        ({"height": 8, "width": 80000}, r"8 x 80000 \(height x width\)"),
        ({"prompt": None}, "neither prompt nor prompt_embeds, only image; add one, or remove the row"),
        ({"prompt": ["a"]}, "prompt is no text"),
        ({"prompt": "a" * 100_000}, "prompt has 100000 characters, more than 65536"),
    ],
)
def test_rows_of_pictures_that_are_refused(tmp_path, change, problem):
    picture(8, 8).save(tmp_path / "a.png")
    picture(8, 8).save(tmp_path / "a.gif")
    picture(9, 8).save(tmp_path / "odd.png")
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "bomb.png").write_bytes(png(60_000, 60_000))
    (tmp_path / "large.png").write_bytes(png(12_000, 12_000))
    (tmp_path / "deep.png").write_bytes(png(8, 8, depth=16, kind=0))
    (tmp_path / "hollow.png").write_bytes(png(8, 8))
    os.mkfifo(tmp_path / "pipe")
    reader = RowReader(NEEDS, folder=tmp_path)
    row = {"image": "a.png", "prompt": "a"}
    loaded(reader, row)
    value = {name: part for name, part in (row | change).items() if part is not None}
    with pytest.raises(DataError, match=problem) as caught:
        loaded(reader, value)
    assert str(caught.value).startswith("rows.jsonl line 1: ")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_too_large_is_not_opened(tmp_path, reader, monkeypatch):
    picture(4, 4).save(tmp_path / "a.png")
    monkeypatch.setattr(images, "FILE_BYTES_MAX", 10)
    with pytest.raises(DataError, match=r"a.png has [0-9]+ bytes, more than 10"):
        reader.plan(as_row({"image": "a.png", "prompt": ""}))


def test_a_tensor_that_changes_after_it_was_planned(tmp_path, reader):
    row, _ = cached_row(tmp_path, 0)
    planned = reader.plan(as_row(row))
    cached_row(tmp_path, 0, latents=(4, 2, 2))
    with pytest.raises(DataError, match=r"line 1: latents: .*0.safetensors was changed while it was read"):
        reader.load(planned)


@pytest.mark.parametrize(
    ("size", "problem"),
    [
        ({"height": 8}, "--height and --width: give both or neither"),
        ({"height": 12, "width": 8}, "--height 12: this model takes multiples of 8 up to 16384"),
        ({"height": 8, "width": 20000}, "--width 20000: this model takes multiples of 8 up to 16384"),
    ],
)
def test_sizes_that_a_model_does_not_take(tmp_path, size, problem):
    with pytest.raises(ConfigError, match=problem):
        RowReader(NEEDS, folder=tmp_path, **size)


def test_where_relative_paths_begin(tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.touch()
    assert folder_of(str(rows)) == folder_of(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert folder_of("rows.jsonl") == tmp_path
    for elsewhere in ("s3://bucket/rows.jsonl", "somebody/some-pictures"):
        assert folder_of(elsewhere) is None
        with pytest.raises(DataError, match=r"image a.png: these rows are in no local folder, so name it in"):
            RowReader(RowNeeds(), folder=None).plan(as_row({"image": "a.png", "prompt": ""}))
